"""vLLM as the engine of grpo.py's generators: `rolecall run examples/grpo.py --model hf:DIRECTORY --engine vllm`."""

import tempfile
from pathlib import Path

import torch
from grpo import Grpo, Samples
from grpo_models import Text
from safetensors.torch import save_file
from torch import Tensor

from rolecall import UsageError

try:
    from vllm import LLM, SamplingParams
except ImportError as error:
    raise UsageError(f"ENGINE=vllm: needs vllm in the generators' environment ({error}): pip install vllm") from None


class Vllm:
    def __init__(self, settings: Grpo) -> None:
        directory, self.answer = settings.model.removeprefix("hf:"), settings.answer
        self.text = Text(directory)
        # each worker's own seed: of one seed, all generators would draw the same samples
        self.llm = LLM(model=directory, seed=torch.initial_seed() % 2**31)

    def load(self, tensors: dict[str, Tensor]) -> None:
        named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        with tempfile.TemporaryDirectory(prefix="grpo-") as folder:  # vLLM reads it in processes of its own
            save_file(named, Path(folder) / "model.safetensors")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()  # of the keys and values that the weights before computed

    def sample(self, prompts: list[str], group: int) -> Samples:
        tokens = self.text.encode(prompts)
        rows = zip(tokens, self.text.mask(tokens).bool(), strict=True)
        starts = [{"prompt_token_ids": row[mask].tolist()} for row, mask in rows]
        # logprobs=0: of the sampled token alone; the one end is that of grpo_models.py, whatever the model's files say
        ends = {"ignore_eos": True, "stop_token_ids": [self.text.end], "max_tokens": self.answer}
        params = SamplingParams(n=group, temperature=1.0, logprobs=0, **ends)
        outputs = [one for each in self.llm.generate(starts, params, use_tqdm=False) for one in each.outputs]
        answers = torch.full((len(outputs), self.answer), self.text.end)
        logprobs = torch.zeros(answers.shape)
        for row, output in enumerate(outputs):
            steps = list(zip(output.token_ids, output.logprobs, strict=True))
            answers[row, : len(steps)] = torch.tensor(output.token_ids)
            logprobs[row, : len(steps)] = torch.tensor([step[token].logprob for token, step in steps])
        tokens = torch.cat([tokens.repeat_interleave(group, 0), answers], 1)
        return Samples(texts=self.text.decode(answers), tokens=tokens, logprobs=logprobs)
