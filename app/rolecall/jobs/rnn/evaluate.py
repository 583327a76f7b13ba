"""`rolecall eval rnn`: the perplexity of a saved model, and generated text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.corpus import Text, Vocabulary
from rolecall.jobs.rnn.model import LanguageModel
from rolecall.jobs.support import track

COMPLETION_TOKENS = 100
TEMPERATURE = 0.8  # of sampling: lower values prefer likely tokens
MAX_LOSS = 30.0  # nats


def evaluate(settings: RnnSettings, state: dict[str, Any]) -> dict[str, float]:
    """The perplexity of the validation text. Raises UsageError if CORPUS is not the text of the checkpoint."""
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


@torch.no_grad()
def complete(settings: RnnSettings, state: dict[str, Any], prompt: str) -> str:
    """`prompt`, continued by COMPLETION_TOKENS tokens."""
    model, vocabulary = restore(settings, state)
    generator = torch.Generator().manual_seed(settings.seed)
    tokens, lstm_state = vocabulary.encode(prompt), model.lstm.start(1)
    if not len(tokens):
        tokens = torch.zeros(1, dtype=torch.int64)
    numbers: list[int] = []
    while len(numbers) < COMPLETION_TOKENS:
        hidden, lstm_state = model.lstm(model.embedding(tokens[:, None]), lstm_state)
        numbers.append(model.decoder.sample(hidden[-1, 0], TEMPERATURE, generator))
        tokens = torch.tensor(numbers[-1:])
    return prompt + vocabulary.decode(numbers)


def perplexity(loss: float) -> float:
    """The perplexity at a mean `loss` per token, capped so that the number of a diverged model can be printed."""
    return math.exp(min(loss, MAX_LOSS))


@torch.no_grad()
def validation_loss(model: LanguageModel, settings: RnnSettings, tokens: Tensor) -> float:
    """The mean loss per token of `tokens` [tokens]."""
    model.eval()
    streams, state = corpus.streams(tokens, settings.batch_size), model.lstm.start(settings.batch_size)
    total = 0.0
    for number in track(range(corpus.steps(streams, settings.sequence)), "evaluating", unit="batches"):
        loss, state = model.loss(*corpus.window(streams, number, settings.sequence), state)
        total += float(loss)
    return total / corpus.targets(streams)


def text_of(settings: RnnSettings, state: dict[str, Any]) -> Text:
    """The text of CORPUS. Raises UsageError if it is not the text of the checkpoint."""
    text = corpus.load(settings)
    if text.digest != state["text"]["digest"]:
        raise UsageError(f"CORPUS={settings.corpus}: the text is not the one that the checkpoint was trained on")
    return text


def restore(settings: RnnSettings, state: dict[str, Any]) -> tuple[LanguageModel, Vocabulary]:
    """The model of a checkpoint's `state`, in evaluation mode, and its vocabulary."""
    with UsageError.wrap("the checkpoint holds no model of rnn", KeyError, TypeError, RuntimeError):
        vocabulary = Vocabulary(tuple(state["text"]["vocabulary"]))
        model = LanguageModel(settings, len(vocabulary))
        model.embedding.load_state_dict(state["embedding"])
        model.lstm.load_state_dict(state["trainer"]["lstm"])
        model.decoder.load_state_dict(state["decoder"])
    return model.eval(), vocabulary
