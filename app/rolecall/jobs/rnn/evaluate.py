"""`python -m rolecall eval rnn`: the perplexity of a saved model, and text that it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.corpus import Text, Vocabulary
from rolecall.jobs.rnn.model import LanguageModel, Lstm
from rolecall.jobs.support import track


def evaluate(settings: RnnSettings, state: dict[str, Any]) -> dict[str, float]:
    """Perplexity of the validation text. Raises UsageError for another text than the checkpoint's."""
    model, _ = restore(settings, state)
    text = text_of(settings, state)
    torch.set_num_threads(settings.cpu_threads)
    loss = validation_loss(model, settings, text.validation)
    return {
        "perplexity": math.exp(loss),
        "loss": loss,
        "tokens": float(len(text.validation)),
        "epochs": float(len(state["history"])),
    }


def complete(settings: RnnSettings, state: dict[str, Any], prompt: str) -> str:
    """`prompt` and SAMPLE_TOKENS tokens that the model continues it with."""
    model, vocabulary = restore(settings, state)
    generator = torch.Generator().manual_seed(settings.seed)

    def choose(hidden: Tensor) -> int:
        return model.decoder.sample(hidden, settings.temperature, generator)

    return prompt + continuation(vocabulary, prompt, settings.sample_tokens, model.lstm, model.embedding, choose)


def perplexity(loss: float) -> float:
    """The perplexity at a mean `loss` of a token; capped, so that a diverged model's can be printed."""
    return math.exp(min(loss, 30.0))


@torch.no_grad()
def validation_loss(model: LanguageModel, settings: RnnSettings, tokens: Tensor) -> float:
    """The mean loss of a token of `tokens` [tokens]."""
    model.eval()
    streams, state = corpus.streams(tokens, settings.batch_size), model.lstm.start(settings.batch_size)
    total = 0.0
    for number in track(range(corpus.steps(streams, settings.sequence)), "evaluating", unit="batches"):
        loss, state = model.loss(*corpus.window(streams, number, settings.sequence), state)
        total += float(loss)
    return total / corpus.targets(streams)


@torch.no_grad()
def continuation(
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


def text_of(settings: RnnSettings, state: dict[str, Any]) -> Text:
    """The text of CORPUS. Raises UsageError where it is not the checkpoint's."""
    text = corpus.load(settings)
    if text.digest != state["text"]["digest"]:
        raise UsageError(f"CORPUS={settings.corpus}: the text is not the one that the checkpoint was trained on")
    return text


def restore(settings: RnnSettings, state: dict[str, Any]) -> tuple[LanguageModel, Vocabulary]:
    """The model of a checkpoint's `state`, ready to evaluate, and its vocabulary."""
    with UsageError.wrap("the checkpoint holds no model of rnn", KeyError, TypeError, RuntimeError):
        vocabulary = Vocabulary(tuple(state["text"]["vocabulary"]))
        model = LanguageModel(settings, len(vocabulary))
        model.embedding.load_state_dict(state["embedding"])
        model.lstm.load_state_dict(state["trainer"]["lstm"])
        model.decoder.load_state_dict(state["decoder"])
    return model.eval(), vocabulary
