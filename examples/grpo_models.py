"""Hugging Face models for grpo.py: `rolecall run examples/grpo.py --model hf:DIRECTORY`, after `pip install
'rolecall[llm]'`. DIRECTORY has the model and its tokenizer, as `save_pretrained` writes them.
"""

import importlib
import sys
import warnings
from pathlib import Path

import torch
from grpo import Policy
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


class Text:
    """The tokenizer in `directory`: tokens padded on the left."""

    def __init__(self, directory: str) -> None:
        if not Path(directory).is_dir():  # otherwise transformers takes it for the name of a model in its cache
            raise UsageError(f"MODEL=hf:{directory}: there is no such directory; name one that save_pretrained wrote")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, padding_side="left")
        except (OSError, ValueError) as error:
            raise UsageError(f"MODEL=hf:{directory}: its tokenizer cannot be loaded: {first(error)}") from None
        if self.tokenizer.eos_token_id is None:
            raise UsageError(f"MODEL=hf:{directory}: its tokenizer has no eos_token, which ends a completion; set it")
        self.end = int(self.tokenizer.eos_token_id)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.pad = int(self.tokenizer.pad_token_id)

    def encode(self, prompts: list[str]) -> Tensor:
        tokens: Tensor = self.tokenizer(prompts, padding=True, return_tensors="pt").input_ids
        return tokens

    def encode_answers(self, answers: list[str]) -> Tensor:
        rows = [[*row, self.end] for row in self.tokenizer(answers, add_special_tokens=False).input_ids]
        longest = max(map(len, rows))
        return torch.tensor([row + [self.end] * (longest - len(row)) for row in rows])

    def decode(self, tokens: Tensor) -> list[str]:
        rows = (row[: row.index(self.end)] if self.end in row else row for row in tokens.tolist())
        # special tokens stay visible: a reward must not take "8<pad>5" for "85"
        return [str(self.tokenizer.decode(row, clean_up_tokenization_spaces=False)) for row in rows]

    def mask(self, tokens: Tensor) -> Tensor:
        """0 at the padding on the left, and 1 elsewhere: what follows a completion's end is not looked at."""
        return ((tokens != self.pad).cumsum(1) > 0).long()


class HuggingFace(Policy):
    """The causal language model in `directory`, in float32 as an optimizer needs it."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.text = Text(directory)
        self.pad, self.end = self.text.pad, self.text.end
        try:  # never code from the directory: `trust_remote_code` is off
            self.model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UsageError(f"MODEL=hf:{directory}: no causal model can be loaded: {first(error)}") from None

    def encode(self, prompts: list[str]) -> Tensor:
        return self.text.encode(prompts)

    def encode_answers(self, answers: list[str]) -> Tensor:
        return self.text.encode_answers(answers)

    def decode(self, tokens: Tensor) -> list[str]:
        return self.text.decode(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.text.mask(tokens)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits: Tensor = self.model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
        return logits

    @torch.no_grad()
    def sample(self, tokens: Tensor, most: int, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """As Policy's, with a cache of keys and values; ends early if all answers have ended."""
        answers, logprobs = (
            tokens.new_full((len(tokens), most), self.end),
            torch.zeros(len(tokens), most).to(tokens.device),
        )
        mask, ended = self.text.mask(tokens), torch.zeros_like(tokens[:, :1], dtype=torch.bool)
        places, fed, cache = (mask.cumsum(1) - 1).clamp(min=0), tokens, None
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
        return torch.cat([tokens, answers], 1), logprobs


def first(error: Exception) -> str:
    """The first line."""
    return str(error).strip().partition("\n")[0]
