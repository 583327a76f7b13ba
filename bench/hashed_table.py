"""Hashed and fixed tables of `hybrid` in one process: how they grow, how fast they are, and what they learn."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch.nn import functional

from rolecall.jobs.hybrid import HybridSettings, data, evaluate, tables
from rolecall.jobs.hybrid.hashed import HashedTable
from rolecall.jobs.hybrid.hashed_ids import Ids, mix
from rolecall.jobs.hybrid.model import LocalModel, build_optimizer
from rolecall.jobs.hybrid.table import Bags, Table

T = TypeVar("T")
DEADLINE = 3000.0  # a fail-safe
SKEW = 1.05  # of Zipf's law: id number n comes as often as n^-SKEW
IDS_THERE_ARE = 2.0**62
LOOKUPS = 1 << 17  # of a step
BAG = 64  # ids
REGISTERS = 16  # bits of a hash that choose a register: the count is off by 1.04 / 2^8, 0.4 %
ROW_BYTES = {"fixed": 4, "hashed": 4 + 8 + 8 + 2 * 12}  # beside its elements of 4: squares; id, step, cells of the map
TRAINERS = 2  # whose batches are one


@dataclass
class Growth:
    """What a hashed table came to; bytes are of the whole process."""

    distinct: float
    lookups: int
    seconds: float
    peak_bytes: int
    rows: int
    births: int
    evicted: int
    filter_fill: float


class Distinct:
    """Counts distinct ids in 64 KiB: HyperLogLog, Flajolet et al. 2007, for many more ids than registers."""

    def __init__(self) -> None:
        self._longest = np.zeros(1 << REGISTERS, np.uint8)

    def add(self, ids: Ids) -> None:
        hashes = mix(mix(ids))
        register, rest = (hashes >> np.uint64(64 - REGISTERS)).astype(np.intp), hashes << np.uint64(REGISTERS)
        leading = 64 - np.frexp(rest.astype(np.float64))[1]
        np.maximum.at(self._longest, register, (leading + 1).astype(np.uint8))

    @property
    def count(self) -> float:
        registers = len(self._longest)
        return float(0.7213 / (1 + 1.079 / registers) * registers**2 / np.exp2(-self._longest.astype(float)).sum())


def zipf(seed: int) -> Iterator[Ids]:
    """Ids [LOOKUPS] of step after step: random numbers of 62 bits by Zipf's law, hashed."""
    generator, span = np.random.default_rng(seed), 1 - IDS_THERE_ARE ** (1 - SKEW)
    while True:
        numbers = (1 - generator.random(LOOKUPS) * span) ** (1 / (1 - SKEW))
        yield mix(np.floor(numbers).astype(np.int64)).view(np.int64)


def apart(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a fresh process, so that its memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result(timeout=DEADLINE)


def make_step(table: Table, bags: Bags) -> None:
    """A lookup of the bags, and an update."""
    vectors = table(bags).detach()
    plan = table.plan([bags])
    table.advance(plan, plan.gradient(vectors.fill_(0.1)))


def grow(distinct: float, max_rows: int, filter_ids: int, width: int) -> Growth:
    """Feeds a server's table until so many distinct ids were looked up."""
    torch.set_num_threads(1)
    settings = HybridSettings(table="hashed", max_rows=max_rows, filter_ids=filter_ids, embedding_dim=width)
    table, counted, process = HashedTable(settings, 0), Distinct(), psutil.Process()
    offsets = torch.arange(0, LOOKUPS + 1, BAG)
    lookups = births = evicted = peak = 0
    seconds, stream = 0.0, zipf(1)
    while counted.count < distinct:
        for _ in range(8):
            ids = next(stream)
            counted.add(ids)
            begun = time.perf_counter()
            bags = Bags(torch.from_numpy(ids), offsets, None)
            vectors, plan = table(bags).detach(), table.plan([bags])
            table.advance(plan, plan.gradient(vectors.fill_(0.1)))
            seconds += time.perf_counter() - begun
            lookups, births = lookups + LOOKUPS, births + len(plan.new_ids)
            evicted += sum(plan.evictions.values())
            peak = max(peak, process.memory_info().rss)
    return Growth(counted.count, lookups, seconds, peak, table.alive, births, evicted, table.filter.fill)


def lookups_per_s(kind: str, rows: int, width: int, steps: int) -> float:
    """Of a table of `rows` rows, looked up and updated, after as many steps that are not measured."""
    torch.set_num_threads(1)
    settings = HybridSettings(table=kind, max_rows=rows, num_embeddings=rows, embedding_dim=width)  # type: ignore[arg-type]
    table, stream, offsets, seconds = tables.build(settings, 0), zipf(2), torch.arange(0, LOOKUPS + 1, BAG), []
    table.fill()
    for _ in range(2 * steps):
        ids = next(stream)
        bags = Bags(torch.from_numpy(ids if kind == "hashed" else ids % rows), offsets, None)
        begun = time.perf_counter()
        make_step(table, bags)
        seconds.append(time.perf_counter() - begun)
    return LOOKUPS / statistics.median(seconds[steps:])


def rows_in(size: float, kind: str, width: int, filter_ids: int = 0) -> int:
    """The rows that a table of `size` bytes has."""
    return int((size - 2 * filter_ids) / (4 * width + ROW_BYTES[kind]))


def training_ids() -> int:
    """Distinct ids in the samples of the default training."""
    return len(data.load(HybridSettings(table="hashed")).train.bags.rows.unique())


def accuracy(kind: str, rows: int, filter_ids: int, sightings: int, seed: int) -> float:
    """On the test samples, after the default training with a table of `rows` rows, in one process."""
    torch.set_num_threads(1)
    settings = HybridSettings(table=kind, max_rows=rows, num_embeddings=rows, filter_ids=filter_ids,
                              sightings=sightings, seed=seed)  # type: ignore[arg-type]  # fmt: skip
    samples, table = data.load(settings), tables.build(settings, 0)
    model = LocalModel(settings, samples.classes, table)
    table.fill()
    optimizer = build_optimizer(settings, model.dense.parameters())
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(seed * 2**20 + epoch)
        for batch in torch.randperm(len(samples.train), generator=generator).split(settings.batch_size * TRAINERS):
            taken = samples.train.take(batch)
            vectors = table(taken.bags).detach().requires_grad_()
            optimizer.zero_grad()
            functional.cross_entropy(model.dense(vectors), taken.labels).backward()
            optimizer.step()
            plan = table.plan([taken.bags])
            assert vectors.grad is not None
            table.advance(plan, plan.gradient(vectors.grad))
    return evaluate.accuracy(model, samples.test)
