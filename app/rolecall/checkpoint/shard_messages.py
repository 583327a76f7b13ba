"""What travels between rank 0 and those who hold shares of a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rolecall.checkpoint.shardfile import Column, ShardFile


@dataclass(frozen=True)
class Order:
    """Capture what is there after `step`, for the checkpoint `stem` of `generation`. `mode` is CHECKPOINT_SHARDS;
    `kept` are the checkpoints that there are, `dropped` those that were deleted since the last order. `whole` says that
    files of earlier checkpoints cannot be used again, `drain` that the generation ends with this one.
    """

    step: int
    stem: str
    generation: int
    mode: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    whole: bool = False
    drain: bool = False


@dataclass(frozen=True)
class Problem:
    """Why something was not done; `usage` says that it never can be."""

    text: str
    usage: bool = False


@dataclass(frozen=True)
class Earlier:
    """Files of the checkpoint `stem` that are part of the new one, too; `shared` says that they are in its folder."""

    stem: str
    names: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Begin:
    """A file of a share, whose bytes follow."""

    name: str
    columns: dict[str, Column]


@dataclass(frozen=True)
class Written:
    """The end of a share's capture: the files that this rank wrote, and for how many seconds changes waited."""

    files: list[ShardFile]
    stalled: float


Item = Earlier | Begin | Tensor | Written | Problem  # of a share that is sent
