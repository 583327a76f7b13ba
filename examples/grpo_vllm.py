"""vLLM as what grpo.py's generators sample with: `rolecall run examples/grpo.py --model hf:DIRECTORY --engine vllm`."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from grpo_models import Tokenized
from safetensors.torch import save_file
from torch import Tensor

from rolecall import UsageError

try:
    from vllm import LLM, SamplingParams
except ImportError as error:
    raise UsageError(f"ENGINE=vllm: needs vllm in the generators' environment ({error}): pip install vllm") from None


class Vllm(Tokenized):
    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        # each worker's own seed: of one seed, all generators would draw the same samples
        self.llm = LLM(model=directory, seed=torch.initial_seed() % 2**31)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        named = {name.removeprefix("model."): tensor for name, tensor in state_dict.items()}  # of HuggingFace.model
        with tempfile.TemporaryDirectory(prefix="grpo-") as folder:  # vLLM reads it in processes of its own
            save_file(named, Path(folder) / "model.safetensors")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()  # of the keys and values that the weights before computed

    def sample(self, prompts: list[str], group: int, most: int, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        asked = self.encode(prompts)
        starts = [row[mask].tolist() for row, mask in zip(asked, self.mask(asked).bool(), strict=True)]
        # logprobs=0: of the drawn token alone; answers have the one end of Tokenized, whatever the model's files say
        ends = {"max_tokens": most, "ignore_eos": True, "stop_token_ids": [self.end]}
        params = SamplingParams(n=group, temperature=0.0 if greedy else 1.0, logprobs=0, **ends)
        outputs = self.llm.generate([{"prompt_token_ids": start} for start in starts], params, use_tqdm=False)
        asked = asked.repeat_interleave(group, 0)
        answers, logprobs = torch.full((len(asked), most), self.end), torch.zeros(len(asked), most)
        for row, output in enumerate(one for each in outputs for one in each.outputs):
            steps = list(zip(output.token_ids, output.logprobs, strict=True))
            answers[row, : len(steps)] = torch.tensor(output.token_ids)
            logprobs[row, : len(steps)] = torch.tensor([step[token].logprob for token, step in steps])
        return asked, answers, logprobs
