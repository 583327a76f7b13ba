"""Tiny checkpoints of the four jobs, as runs write them, and what `rolecall export` says of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rolecall import Rows
from rolecall.checkpoint import shardfile
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.shardfile import Column
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid import data as samples
from rolecall.jobs.hybrid.model import build_dense
from rolecall.jobs.hybrid.table import Table
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.rl import RlSettings, envs
from rolecall.jobs.rl import model as policies
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.model import LanguageModel
from rolecall.record.rundir import SHARDS
from tests.integration import learning

STEP = 7


def write(
    folder: Path,
    job: str,
    state: dict[str, Any],
    settings: Mapping[str, Any],
    layout: int = 1,
    **shards: list[dict[str, Rows]],
) -> Path:
    """A checkpoint of `state` and of values that are `shards`: of each rank that holds one, its rows."""
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, job, 1)
    place = folder / SHARDS / checkpoints.stem(STEP)
    files = {
        value: [_shard(place, f"{value}-{number}.safetensors", rows) for number, rows in enumerate(ranks)]
        for value, ranks in shards.items()
    }
    about = {"settings": dict(settings), "layout": layout, "done": 1000.0, "seconds": 12.5}
    return checkpoints.write(STEP, state, about, files)


def _shard(place: Path, name: str, rows: Mapping[str, Rows]) -> shardfile.ShardFile:
    blocks = [part.contiguous().view(torch.uint8).reshape(-1) for each in rows.values() for part in each.tensors]
    columns = {tensor: Column.of(each) for tensor, each in rows.items()}
    return shardfile.write(name, columns, blocks, partial(shardfile.write_piece, place / name))


def noisy(module: nn.Module) -> nn.Module:
    """With weights unlike those that it begins with: an export that forgot the checkpoint's would be seen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


class Small(nn.Module):
    """For MODEL: a network with running means, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def ps(folder: Path, servers: int = 3) -> Path:
    """Of three servers, each with a third of the parameters."""
    settings = {"dataset": "digits", "model": "tests.export.exports:Small", "seed": 1}
    network = noisy(model.build(PsSettings(**settings)))
    flat, buffers = learning.flatten(network), [torch.rand(12), torch.rand(12) + 0.5, torch.tensor(9)]
    total = len(flat)
    bounds = [total * number // servers for number in range(servers + 1)]
    parts = [{"parameters": Rows((flat[low:high].clone(),), total, low)} for low, high in pairwise(bounds)]
    state = {"model": {"buffers": buffers}, "ledger": {"epoch": 2, "version": 90}}
    return write(folder, "ps", state, settings, model=parts)


def rl(folder: Path, **settings: Any) -> Path:
    """Of CartPole, unless `settings` name another."""
    settings = {"env_id": "CartPole-v1", "hidden_size": 8, **settings}
    chosen = RlSettings(**settings)
    trained = policies.build(chosen, envs.describe(chosen).spaces)
    noisy(trained.policy)
    if trained.normalizer is not None:
        trained.normalizer.update(torch.randn(50, *trained.normalizer.mean.shape) * 3 + 1)
    return write(folder, "rl", {"learner": {"model": trained.state_dict()}}, settings, layout=2)


def rnn(folder: Path, text: Path) -> Path:
    """Of two layers, trained on the file `text`."""
    text.write_text("the rank that calls the roll waits for the ranks that answer\n" * 60)
    settings = {"corpus": str(text), "embedding_size": 6, "hidden_size": 5, "batch_size": 4, "sequence": 9}
    read = corpus.load(RnnSettings(**settings))
    trained = noisy(LanguageModel(RnnSettings(**settings), len(read.vocabulary)))
    of_text = {"vocabulary": list(read.vocabulary.words), "digest": read.digest}
    weights: dict[str, Any] = {name: getattr(trained, name).state_dict() for name in ("embedding", "decoder")}
    weights["trainer"] = {"lstm": trained.lstm.state_dict()}
    state = {"text": of_text, "history": [[2.0, 2.0]], **weights}
    return write(folder, "rnn", state, settings)


def lines() -> tuple[list[Any], list[Any]]:
    """For DATASET: bags of some of 50 rows with weights, some of them empty."""
    generator = torch.Generator().manual_seed(3)

    def part(count: int) -> list[Any]:
        sizes = torch.randint(0, 6, (count,), generator=generator).tolist()
        return [
            (torch.randint(0, 50, (size,), generator=generator), torch.rand(size, generator=generator), number % 3)
            for number, size in enumerate(sizes)
        ]

    return part(30), part(40)


def hybrid(folder: Path, servers: int = 2) -> Path:
    """Of two servers, each with every other row."""
    settings = {"dataset": "tests.export.exports:lines", "num_embeddings": 50, "embedding_dim": 4, "hidden_size": 6}
    chosen = HybridSettings(**settings, servers=servers)
    tables = [Table(chosen, ordinal) for ordinal in range(servers)]
    for table in tables:
        table.fill()
    read = samples.load(chosen)
    dense = noisy(build_dense(chosen, read.classes))
    progress = {"step": STEP, "epoch": 1, "position": 0, "accuracy": 0.5}
    of_data = {"classes": read.classes, "digest": read.digest}
    state = {**progress, **of_data, "dense": {"weights": dense.state_dict()}}
    return write(folder, "hybrid", state, settings, embeddings=[dict(table.rows()) for table in tables])
