"""A stand-in for vLLM: its documented offline API, as far as examples/grpo_vllm.py uses it, over transformers.

Refuses what vLLM refuses, weights that do not travel between processes, and samples from stale keys and values.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        assert self.n >= 1
        assert self.temperature == 1.0, "the stand-in has no other"
        assert self.max_tokens is None or self.max_tokens >= 1
        assert self.logprobs is None or self.logprobs >= 0


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


class LLM:
    def __init__(self, model: str, *, seed: int = 0, **others: Any) -> None:
        assert not others, f"the stand-in knows no {others}"
        assert 0 <= seed < 2**32
        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.stale = False

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        """Calls the worker's `method`. Of its methods, the stand-in has `reload_weights(weights_path=...)`."""
        assert method == "reload_weights"
        kwargs = kwargs or {}
        assert [*args, *kwargs] == ["weights_path"]
        assert len(pickle.dumps(kwargs)) < 1000, "for control messages only"
        paths = sorted(Path(kwargs["weights_path"]).glob("*.safetensors"))
        assert paths, "the directory has no weights"
        for path in paths:
            self.model.load_state_dict(load_file(path))
        self.stale = True
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.stale = False
        return True

    def generate(
        self, prompts: Sequence[TokensPrompt], sampling_params: SamplingParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        assert not self.stale, "the keys and values in the cache are of the weights before"
        answers = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            outputs = [self._complete(index, ids, sampling_params) for index in range(sampling_params.n)]
            answers.append(RequestOutput(ids, outputs))
        return answers

    @torch.no_grad()
    def _complete(self, index: int, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        ends = {*(params.stop_token_ids or []), *([] if params.ignore_eos else [self.tokenizer.eos_token_id])}
        tokens, logprobs = list[int](), list[dict[int, Logprob]]()
        while len(tokens) < (params.max_tokens or 16) and not (tokens and tokens[-1] in ends):
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            distribution = logits.float().log_softmax(0)
            token = int(distribution.exp().multinomial(1, generator=self.generator))
            tokens.append(token)
            logprobs.append({token: Logprob(float(distribution[token]))})
        total = sum(one[token].logprob for token, one in zip(tokens, logprobs, strict=True))
        reason = "stop" if tokens[-1] in ends else "length"
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return CompletionOutput(index, text, tokens, total, None if params.logprobs is None else logprobs, reason)
