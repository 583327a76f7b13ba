"""Rank 0 and members that are there, are lost and come back, each with a disk of its own, in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.checkpoint import shardfile
from rolecall.checkpoint.capture import Rows
from rolecall.checkpoint.checkpoint import Checkpoints, Snapshot
from rolecall.checkpoint.shardfile import Column, ShardFile
from rolecall.config import Settings
from rolecall.copies.keeping import Keeper
from rolecall.copies.store import Store
from rolecall.errors import PeerLostError
from rolecall.record import rundir

ROWS = 60_000  # of a table, whose file has several chunks
WIDE = 100_000  # numbers of a state


class Members:
    """`rank0` writes checkpoints; `stores` are what the members that are there hold. `answer` may change an answer."""

    def __init__(self, directory: Path, names: str = "ab", **settings: Any) -> None:
        self.directory, self.sent = directory, 0
        self.settings = Settings(**{"checkpoint_copies": 1, "rejoin_timeout": 0.05, **settings})
        self.stores = {name: self.store(name) for name in names}
        self.answer: Callable[[str, str, Any], Any] = lambda name, method, value: value
        self.metrics = telemetry.build(telemetry.WORKER, CollectorRegistry())
        self.generation, self.drain_ordered = 0, Event()
        self.begin()

    def store(self, name: str) -> Store:
        return Store(self.directory / name / rundir.COPIES, name)

    @property
    def disk(self) -> Path:
        """Rank 0's."""
        return self.directory / "rank0"

    def begin(self) -> None:
        """Another generation, of a worker of rank 0 that knows nothing."""
        self.generation += 1
        self.disk.mkdir(exist_ok=True)
        self.checkpoints = Checkpoints(self.disk, "ps", self.generation, keep=2)
        here = Store(self.disk / rundir.COPIES, "rank0")
        self.keeper = Keeper(
            self.checkpoints,
            here,
            self.settings,
            lambda seconds: self,
            lambda: [*self.stores],
            is_draining=self.drain_ordered.is_set,
            metrics=self.metrics,
        )
        self.checkpoints.copies = self.keeper

    def ask(self, to: str, method: str, *args: Any, wait: float = 0.0) -> Future[Any]:
        """In place of a connection's."""
        future: Future[Any] = Future()
        try:
            if to not in self.stores:
                raise PeerLostError(f"{to} was lost")
            self.sent += sum(memoryview(each).nbytes for each in args[3]) if method == "copies_put" else 0
            future.set_result(self.answer(to, method, getattr(self.stores[to], method)(*args)))
        except Exception as error:
            future.set_exception(error)
        return future

    def write(self, step: int, shards: dict[str, list[ShardFile]] | None = None, changed: int = 0) -> str:
        """A checkpoint whose numbers are the same but for the first `changed`. Returns its file's name once it is
        copied, or that failed."""
        numbers = torch.arange(float(WIDE))
        numbers[:changed] = step
        path = self.checkpoints.write(step, {"numbers": numbers}, shards=shards)
        self.keeper.wait()
        return path.name

    def shard(self, step: int, name: str, value: float) -> ShardFile:
        """A file of shards of the checkpoint of `step`."""
        folder = self.disk / rundir.SHARDS / self.checkpoints.stem(step)
        folder.mkdir(parents=True, exist_ok=True)
        rows = Rows((torch.full((ROWS, 1), value),), ROWS)

        def put(place: int, data: torch.Tensor) -> None:
            shardfile.write_piece(folder / name, place, data)

        blocks = [rows.tensors[0].reshape(-1).view(torch.uint8)]
        return shardfile.write(name, {"rows": Column.of(rows)}, blocks, put)

    def newest(self) -> Snapshot | None:
        return self.checkpoints.newest()

    def held(self, name: str) -> list[str]:
        return sorted(path.name for path in self.stores[name].directory.glob("checkpoint-*"))
