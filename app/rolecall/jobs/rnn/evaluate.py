"""`python -m rolecall eval rnn`: the perplexity of a saved model, and text that it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolecall.config import UsageError
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.corpus import Vocabulary
from rolecall.jobs.rnn.model import LanguageModel, Lstm


def evaluate(settings: RnnSettings, state: dict[str, Any]) -> dict[str, float]:
    """Perplexity of the validation text. What the model and the text depend on is the checkpoint's."""
    settings, trained, _ = _load(settings, state)
    text = corpus.load(settings)
    if text.digest != state["digest"]:
        raise UsageError(f"CORPUS={settings.corpus}: the text is not the one that the checkpoint learned from")
    torch.set_num_threads(settings.cpu_threads)
    loss = validation_loss(trained, settings, text.validation)
    return {
        "perplexity": math.exp(loss),
        "loss": loss,
        "tokens": float(len(text.validation)),
        "epochs": float(state["epoch"]),
        "steps": float(state["step"]),
    }


def complete(settings: RnnSettings, state: dict[str, Any], prompt: str) -> str:
    """`prompt` and SAMPLE_TOKENS tokens that the model continues it with."""
    settings, trained, vocabulary = _load(settings, state)
    generator = torch.Generator().manual_seed(settings.seed)
    return prompt + continued(
        vocabulary,
        prompt,
        settings.sample_tokens,
        trained.lstm,
        lambda tokens: trained.embedding(tokens),
        lambda hidden: trained.decoder.sample(hidden, settings.temperature, generator),
    )


@torch.no_grad()
def validation_loss(trained: LanguageModel, settings: RnnSettings, tokens: Tensor) -> float:
    """The mean loss of a token."""
    trained.eval()
    found, state = corpus.streams(tokens, settings.batch_size), trained.lstm.start(settings.batch_size)
    total = 0.0
    for number in range(corpus.steps(found, settings.sequence)):
        loss, state = trained.loss(*corpus.window(found, number, settings.sequence), state)
        total += float(loss)
    return total / (found.numel() - found.shape[1])


@torch.no_grad()
def continued(
    vocabulary: Vocabulary,
    prompt: str,
    length: int,
    lstm: Lstm,
    embed: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor], int],
) -> str:
    """The text of the `length` tokens that `choose` draws after `prompt`, each from a hidden state [hidden]."""
    tokens = vocabulary.encode(prompt)
    if not len(tokens):
        tokens = torch.zeros(1, dtype=torch.int64)
    numbers: list[int] = []
    state = lstm.start(1)
    while len(numbers) < length:
        hidden, state = lstm(embed(tokens[:, None]), state)
        numbers.append(choose(hidden[-1, 0]))
        tokens = torch.tensor(numbers[-1:])
    return vocabulary.decode(numbers)


def _load(settings: RnnSettings, state: dict[str, Any]) -> tuple[RnnSettings, LanguageModel, Vocabulary]:
    try:
        settings = settings.model_copy(update=state["settings"])
        vocabulary = Vocabulary(tuple(state["vocabulary"]))
        trained = LanguageModel(settings, len(vocabulary))
        for name, part in trained.named_children():
            part.load_state_dict(state["weights"][name])
    except (KeyError, TypeError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"the checkpoint holds no model of rnn ({type(error).__name__}: {first})") from error
    return settings, trained.eval(), vocabulary
