"""Hugging Face models for grpo.py: `rolecall run examples/grpo.py --model hf:DIRECTORY`, after `pip install
'rolecall[llm]'`. DIRECTORY has the model and its tokenizer, as `save_pretrained` writes them.
"""

import importlib
import sys
import warnings
from pathlib import Path

import torch
from grpo import Grpo, Policy
from torch import Tensor

from rolecall import UsageError

try:
    importlib.import_module("torchvision")
except (ImportError, RuntimeError):  # missing, or built for another torch: transformers would fail as it imports it
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # text needs none
try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    raise UsageError(f"MODEL=hf:...: needs transformers ({error}): pip install 'rolecall[llm]'") from None
disable_progress_bar()  # a line of it in the logs of each worker
# renamed in 5.24, while vLLM needs a version before
warnings.filterwarnings("ignore", message=r".*past_key_values", category=FutureWarning)


def build(settings: Grpo, sampling: bool) -> Policy:
    """The policy of the learner, or what a generator samples with."""
    kind, _, directory = settings.model.partition(":")
    if kind != "hf" or not directory:
        raise UsageError(
            f"MODEL={settings.model} ENGINE={settings.engine}: must be MODEL=hf:DIRECTORY, or toy and torch"
        )
    if not Path(directory).is_dir():  # otherwise transformers takes it for the name of a model in its cache
        raise UsageError(f"MODEL=hf:{directory}: there is no such directory; name one that save_pretrained wrote")
    if sampling and settings.engine == "vllm":
        from grpo_vllm import Vllm

        return Vllm(directory)
    return HuggingFace(directory)


class Tokenized(Policy):
    """A policy with the tokenizer in `directory`."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, padding_side="left")
        except (OSError, ValueError) as error:
            raise UsageError(f"MODEL=hf:{directory}: its tokenizer cannot be loaded: {first(error)}") from None
        if self.tokenizer.eos_token_id is None:
            raise UsageError(f"MODEL=hf:{directory}: its tokenizer has no eos_token, which ends an answer; set it")
        self.end = int(self.tokenizer.eos_token_id)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.pad = int(self.tokenizer.pad_token_id)

    def encode(self, texts: list[str], answers: bool = False) -> Tensor:
        if not answers:
            return torch.tensor(self.tokenizer(texts, padding=True).input_ids)
        rows = self.tokenizer(texts, add_special_tokens=False).input_ids
        length = max(map(len, rows)) + 1
        return torch.tensor([row + [self.end] * (length - len(row)) for row in rows])

    def decode(self, answers: Tensor) -> list[str]:
        rows = (row[: row.index(self.end)] if self.end in row else row for row in answers.tolist())
        # special tokens stay visible: a reward must not take "8<pad>5" for "85"
        return [str(self.tokenizer.decode(row, clean_up_tokenization_spaces=False)) for row in rows]

    def mask(self, tokens: Tensor) -> Tensor:
        """0 at the padding on the left, 1 elsewhere."""
        return ((tokens != self.pad).cumsum(1) > 0).long()


class HuggingFace(Tokenized):
    """The causal language model in `directory`, in float32 as an optimizer needs it."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        try:  # never code from the directory: `trust_remote_code` is off
            self.model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UsageError(f"MODEL=hf:{directory}: no causal model can be loaded: {first(error)}") from None

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.mask(tokens)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits: Tensor = self.model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
        return logits

    @torch.no_grad()
    def sample(self, prompts: list[str], group: int, most: int, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """As Policy's, with a cache of keys and values; ends early if all answers have ended."""
        asked = self.encode(prompts).to(self.model.device).repeat_interleave(group, 0)
        answers = asked.new_full((len(asked), most), self.end)
        logprobs = torch.zeros(answers.shape, device=asked.device)
        mask, ended = self.mask(asked), torch.zeros_like(asked[:, :1], dtype=torch.bool)
        places, fed, cache = (mask.cumsum(1) - 1).clamp(min=0), asked, None
        for column in range(most):
            output = self.model(fed, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            scores = output.logits[:, -1].log_softmax(-1)
            fed = scores.argmax(-1, keepdim=True) if greedy else scores.exp().multinomial(1)
            logprobs[:, column] = scores.gather(1, fed)[:, 0]
            answers[:, column] = fed.masked_fill_(ended, self.end)[:, 0]
            if (ended := fed == self.end).all():
                break
            cache, places = output.past_key_values, places[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(fed)], 1)
        return asked.cpu(), answers.cpu(), logprobs.cpu()


def first(error: Exception) -> str:
    """The first line."""
    return str(error).strip().partition("\n")[0]
