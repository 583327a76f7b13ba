"""A hashed table in a checkpoint: as many rows as each server has, for any number of servers.

Server 0 of 2 saves the columns `0of2.ids`, `0of2.seen` and so on [slots, ...], whose rows are its slots; one that is
free was `seen` in step 0. A server reads those of all servers, and keeps the rows of its ids; where there are as many
servers as before, these are its own.
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
Adopt = Callable[[Ids, Ids], Ids]  # of ids [n] and the steps that they were seen in, their slots; -1: not kept


def columns(tensors: Mapping[str, Tensor], used: int, ordinal: int, servers: int) -> dict[str, Rows]:
    """The first `used` slots of `tensors`, "ids" and "seen" before all others."""
    return {f"{ordinal}of{servers}.{name}": Rows((tensor[:used],), used) for name, tensor in tensors.items()}


def count(shapes: Shapes) -> int:
    """Slots that a checkpoint of these columns has."""
    return sum(shape[0] for name, shape in shapes.items() if name.endswith(".ids"))


@dataclass(frozen=True, kw_only=True)
class Sink(Rows):
    """A column of a checkpoint, `total` long, whose rows are handed on as they are read."""

    take: Callable[[int, Tensor], None]

    def __len__(self) -> int:
        return self.total

    def put(self, values: Tensor, begin: int, first: int, step: int) -> None:
        """Hands on the rows from `begin` on."""
        self.take(begin, values)


class Part:
    """What one server saved, of `slots` slots, on its way to `tensors` here."""

    def __init__(self, slots: int, tensors: Mapping[str, Tensor], adopt: Adopt) -> None:
        self._tensors, self._adopt = tensors, adopt
        self._ids, self._seen = np.empty(slots, np.int64), np.empty(slots, np.int64)
        self._slots = np.empty(0, np.int64)  # here, of each slot there, once all of `seen` was read
        self._left = 0  # rows of other columns that need them

    def take(self, name: str) -> Callable[[int, Tensor], None]:
        """What takes the column `name`."""
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
            self._ids = self._seen = np.empty(0, np.int64)  # the next server's take their memory

    @torch.no_grad()
    def _take(self, name: str, begin: int, values: Tensor) -> None:
        slots = torch.from_numpy(self._slots[begin : begin + len(values)])
        kept, tensor = slots >= 0, self._tensors[name]
        tensor[slots[kept].to(tensor.device)] = values[kept].to(tensor.device)
        self._left -= len(values)
        if not self._left:
            self._slots = np.empty(0, np.int64)


def sinks(shapes: Shapes, ordinal: int, servers: int, tensors: Mapping[str, Tensor], adopt: Adopt) -> dict[str, Rows]:
    """Where the columns of a checkpoint go, but for the filter's. Raises UsageError for those of another table."""
    parts: dict[str, Part] = {}
    chosen: dict[str, Rows] = {}
    for column, (slots, *shape) in shapes.items():
        match = NAME.fullmatch(column)
        if match is None or match[3] not in tensors or shape != list(tensors[match[3]].shape[1:]):
            raise UsageError(
                f"TABLE=hashed: the checkpoint's table is another ({column} {[slots, *shape]}); set what "
                "it was trained with, or another CHECKPOINT_DIR"
            )
        elsewhere = int(match[2]) == servers and int(match[1]) != ordinal
        part = parts.setdefault(match[1], Part(0 if elsewhere else slots, tensors, adopt))
        chosen[column] = Sink((), 0 if elsewhere else slots, take=part.take(match[3]))
    return chosen
