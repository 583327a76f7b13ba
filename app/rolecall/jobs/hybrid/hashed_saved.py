"""The columns of a hashed table in a checkpoint, which any number of servers can load.

Server 0 of 2 saves the columns `0of2.ids`, `0of2.seen` and so on [slots, ...], whose rows are its slots; a free slot
was `seen` in step 0. A server reads the columns of all servers and keeps the rows of its ids; with as many servers as
before, it reads only its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rolecall import Rows, UsageError
from rolecall.jobs.hybrid.hashed_ids import Ids

NAME = re.compile(r"(\d+)of(\d+)\.(\w+)")
Shapes = Mapping[str, tuple[int, ...]]  # by column
Adopt = Callable[[Ids, Ids], Ids]  # (ids [n], steps in which they were seen [n]) to slots [n], -1: not kept


def columns(tensors: Mapping[str, Tensor], used: int, ordinal: int, servers: int) -> dict[str, Rows]:
    """The first `used` slots of `tensors`, "ids" and "seen" before all others."""
    return {f"{ordinal}of{servers}.{name}": Rows((tensor[:used],), used) for name, tensor in tensors.items()}


def count(shapes: Shapes) -> int:
    """The number of slots in a checkpoint of these columns."""
    return sum(shape[0] for name, shape in shapes.items() if name.endswith(".ids"))


@dataclass(frozen=True, kw_only=True)
class Sink(Rows):
    """A column of a checkpoint with `total` rows, which are passed to `take` as they are read."""

    take: Callable[[int, Tensor], None]

    def __len__(self) -> int:
        return self.total

    def put(self, values: Tensor, begin: int, first: int, step: int) -> None:
        """Passes on the rows from `begin` on."""
        self.take(begin, values)


class ServerColumns:
    """Copies the columns of one server, with `slots` slots, to `tensors`."""

    def __init__(self, slots: int, tensors: Mapping[str, Tensor], adopt: Adopt) -> None:
        self._tensors, self._adopt = tensors, adopt
        self._ids, self._seen = np.empty(slots, np.int64), np.empty(slots, np.int64)
        self._slots = np.empty(0, np.int64)  # new slot of each saved slot, once all of `seen` is read
        self._left = 0  # rows of other columns that are not read yet

    def take(self, name: str) -> Callable[[int, Tensor], None]:
        """The function that copies the column `name`."""
        if name == "ids":
            return self._take_ids
        if name == "seen":
            return self._take_seen
        self._left += len(self._ids)
        return lambda begin, values: self._take(name, begin, values)

    def _take_ids(self, begin: int, values: Tensor) -> None:
        self._ids[begin : begin + len(values)] = values.numpy()

    def _take_seen(self, begin: int, values: Tensor) -> None:
        self._seen[begin : begin + len(values)] = values.numpy()
        if begin + len(values) == len(self._seen):
            self._slots = self._adopt(self._ids, self._seen)
            self._ids = self._seen = np.empty(0, np.int64)  # frees memory for the next server

    @torch.no_grad()
    def _take(self, name: str, begin: int, values: Tensor) -> None:
        slots = torch.from_numpy(self._slots[begin : begin + len(values)])
        kept, tensor = slots >= 0, self._tensors[name]
        tensor[slots[kept].to(tensor.device)] = values[kept].to(tensor.device)
        self._left -= len(values)
        if not self._left:
            self._slots = np.empty(0, np.int64)


def sinks(shapes: Shapes, ordinal: int, servers: int, tensors: Mapping[str, Tensor], adopt: Adopt) -> dict[str, Rows]:
    """The targets of the columns of a checkpoint without the filter. Raises UsageError for those of another table."""
    parts: dict[str, ServerColumns] = {}
    chosen: dict[str, Rows] = {}
    for column, (slots, *shape) in shapes.items():
        match = NAME.fullmatch(column)
        if match is None or match[3] not in tensors or shape != list(tensors[match[3]].shape[1:]):
            raise UsageError(
                f"TABLE=hashed: the checkpoint has another table ({column} {[slots, *shape]}); set what it was trained "
                "with, or another CHECKPOINT_DIR"
            )
        elsewhere = int(match[2]) == servers and int(match[1]) != ordinal
        part = parts.setdefault(match[1], ServerColumns(0 if elsewhere else slots, tensors, adopt))
        chosen[column] = Sink((), 0 if elsewhere else slots, take=part.take(match[3]))
    return chosen
