"""The limits of `rnn`: the same model in one process, trained the plain way, and at the default settings."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall import config
from rolecall.config import cores
from rolecall.jobs.rnn import RnnSettings, corpus, evaluate
from rolecall.jobs.rnn.model import LanguageModel
from rolecall.jobs.rnn.optimizer import MAX_GRAD_NORM

# word_language_model's on wikitext-2
VOCABULARY, WIDTH, LAYERS, SEQUENCE, BATCH = 33_278, 200, 2, 35, 20
LEARNING_RATE, CLIP = 0.05, 0.25
WARM = 2  # steps
DEADLINE = 1800.0  # a fail-safe


class Meter:
    """Seconds, and bytes over the loopback network, from `begin` to `end`."""

    def begin(self) -> None:
        self._started, self._before = time.perf_counter(), _loopback()

    def end(self) -> None:
        self.seconds, self.transferred = time.perf_counter() - self._started, _loopback() - self._before


def tokens_per_s(steps: int) -> float:
    """Tokens a second of one plain process with threads for all cores, over `steps` steps."""
    return _apart(_plain, steps)


def perplexity() -> float:
    """Of the validation text, after one process has trained the default model as long and in the same way."""
    return _apart(_default)


def random_text() -> tuple[Tensor, Tensor]:
    """Inputs and targets [sequence, batch]."""
    tokens = torch.randint(VOCABULARY, (SEQUENCE + 1, BATCH), generator=torch.Generator().manual_seed(1))
    return tokens[:-1], tokens[1:]


def _loopback() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def _apart(function: Callable[..., float], *args: object) -> float:
    # a fresh process: the progress display's thread stays out of it
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result(timeout=DEADLINE)


class Plain(nn.Module):
    """As anybody would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.decoder(hidden), state


def _plain(steps: int) -> float:
    torch.set_num_threads(cores())
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    state = torch.zeros(LAYERS, BATCH, WIDTH), torch.zeros(LAYERS, BATCH, WIDTH)
    inputs, targets = random_text()
    started = 0.0
    for number in range(WARM + steps):
        if number == WARM:
            started = time.perf_counter()
        state = state[0].detach(), state[1].detach()
        optimizer.zero_grad()
        logits, state = model(inputs, state)
        functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return BATCH * SEQUENCE * steps / (time.perf_counter() - started)


def _default() -> float:
    settings = config.load(RnnSettings)
    torch.set_num_threads(cores())
    torch.manual_seed(settings.seed)
    text = corpus.load(settings)
    model = LanguageModel(settings, len(text.vocabulary))
    dense = [*model.lstm.parameters(), *model.decoder.parameters()]
    optimizers = [
        torch.optim.Adam(dense, settings.lr, fused=True),
        torch.optim.SparseAdam(model.embedding.parameters(), settings.lr),
    ]
    streams = corpus.streams(text.train, settings.batch_size)
    for _ in range(settings.epochs):
        model.train()
        state = model.lstm.start(settings.batch_size)
        for number in range(corpus.steps(streams, settings.sequence)):
            inputs, targets = corpus.window(streams, number, settings.sequence)
            loss, (hidden, cell) = model.loss(inputs, targets, state)
            state = hidden.detach(), cell.detach()
            for one in optimizers:
                one.zero_grad()
            (loss / targets.numel()).backward()
            _clip(list(model.parameters()), MAX_GRAD_NORM)
            for one in optimizers:
                one.step()
    return math.exp(evaluate.validation_loss(model, settings, text.validation))


def _clip(parameters: list[nn.Parameter], limit: float) -> None:
    """As torch's own, which does not take sparse gradients."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        else:
            gradients.append(parameter.grad)
    norm = torch.sqrt(sum((one.square().sum() for one in gradients), torch.zeros(())))
    if norm > limit:
        for one in gradients:
            one.mul_(limit / norm)
