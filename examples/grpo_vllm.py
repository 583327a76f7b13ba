"""vLLM as the engine of grpo.py's generators: `rolecall run examples/grpo.py --model hf:DIRECTORY --engine vllm`."""

import tempfile
from pathlib import Path

import torch
from grpo import Grpo, Samples
from grpo_models import Text
from safetensors.torch import save_file

from rolecall import UsageError
from rolecall.context.weights import Weights

try:
    from vllm import LLM, SamplingParams
except ImportError as error:
    raise UsageError(f"ENGINE=vllm: needs vllm in the generators' environment ({error}): pip install vllm") from None


class Vllm:
    def __init__(self, settings: Grpo) -> None:
        directory, self.answer = settings.model.removeprefix("hf:"), settings.answer
        self.text, self.version = Text(directory), -1
        # each worker's own seed: of one seed, all generators would draw the same samples
        self.llm = LLM(model=directory, seed=torch.initial_seed() % 2**31)

    def load(self, weights: Weights) -> int:
        if weights.new:
            self.version, tensors = weights.tensors()
            named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
            with tempfile.TemporaryDirectory(prefix="grpo-") as folder:  # vLLM reads it in processes of its own
                save_file(named, Path(folder) / "model.safetensors")
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self.llm.reset_prefix_cache()  # of the keys and values that the weights before computed
        return self.version

    def sample(self, prompts: list[str], group: int) -> Samples:
        tokens = self.text.encode(prompts)
        rows = zip(tokens, self.text.mask(tokens).bool(), strict=True)
        starts = [{"prompt_token_ids": row[mask].tolist()} for row, mask in rows]
        # logprobs=0: of the sampled token alone; the one end is that of grpo_models.py, whatever the model's files say
        ends = {"ignore_eos": True, "stop_token_ids": [self.text.end], "max_tokens": self.answer}
        params = SamplingParams(n=group, temperature=1.0, logprobs=0, **ends)
        outputs = [one for each in self.llm.generate(starts, params, use_tqdm=False) for one in each.outputs]
        drawn = torch.full((len(outputs), self.answer), self.text.pad)
        logprobs, mask = torch.zeros(drawn.shape), torch.zeros(drawn.shape, dtype=torch.bool)
        for row, output in enumerate(outputs):
            each = zip(output.token_ids, output.logprobs, strict=True)
            length = len(output.token_ids)
            drawn[row, :length], mask[row, :length] = torch.tensor(output.token_ids), True
            logprobs[row, :length] = torch.tensor([one[token].logprob for token, one in each])
        tokens = torch.cat([tokens.repeat_interleave(group, 0), drawn], 1)
        return Samples(texts=self.text.decode(drawn), tokens=tokens, logprobs=logprobs, mask=mask)
