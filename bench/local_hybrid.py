"""The limits of `hybrid`: the same model in one process; and the samples that speed is measured with."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.nn import functional

from bench.bags import BATCH, TRAINERS, random_bags
from rolecall import config
from rolecall.jobs.hybrid import HybridSettings, data, evaluate
from rolecall.jobs.hybrid.model import LocalModel

DEADLINE = 900.0  # a fail-safe
Samples = list[tuple[torch.Tensor, int]]


def random_100k() -> tuple[Samples, Samples]:
    """Bags of a table of 100,000 rows."""
    return random_samples(100_000)


def random_1m() -> tuple[Samples, Samples]:
    """Bags of a table of a million rows."""
    return random_samples(1_000_000)


def random_10m() -> tuple[Samples, Samples]:
    """Bags of a table of ten million rows."""
    return random_samples(10_000_000)


def random_samples(rows: int) -> tuple[Samples, Samples]:
    """Training and test samples of a table with `rows` rows."""
    indices, labels = random_bags(rows)
    samples = list(zip(indices, labels.tolist(), strict=True))
    return samples, samples[: TRAINERS * BATCH]


def accuracy() -> float:
    """On the test samples, after one process has trained the default model as long and in the same way."""
    # a fresh process: the progress display's thread stays out of it
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train).result(timeout=DEADLINE)


def _train() -> float:
    settings = config.load(HybridSettings)
    torch.set_num_threads(settings.cpu_threads)
    samples = data.load(settings)
    model = LocalModel(settings, samples.classes)
    model.table.fill()
    # torch's own table and optimizers, but for the state of a row
    table = nn.EmbeddingBag(settings.num_embeddings, settings.embedding_dim, mode="sum", sparse=True,
                            include_last_offset=True, _weight=model.table.weight.detach())  # fmt: skip
    squares = torch.zeros(settings.num_embeddings)
    dense = torch.optim.Adagrad(model.dense.parameters(), settings.lr)
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 2**20 + epoch)
        for batch in torch.randperm(len(samples.train), generator=generator).split(settings.batch_size * TRAINERS):
            taken = samples.train.take(batch)
            vectors = table(taken.bags.rows, taken.bags.offsets, per_sample_weights=taken.bags.weights)
            table.zero_grad()
            dense.zero_grad()
            functional.cross_entropy(model.dense(vectors), taken.labels).backward()
            dense.step()
            assert table.weight.grad is not None
            gradient = table.weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            squares[rows] += values.square().mean(1)
            with torch.no_grad():
                table.weight[rows] -= settings.lr * values / (squares[rows].sqrt()[:, None] + 1e-10)
    return evaluate.accuracy(model, samples.test)
