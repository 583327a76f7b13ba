"""What travels between rank 0 and those who hold shares of a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rolecall.job.shardfile import Column, ShardFile

Shapes = dict[str, tuple[int, ...]]  # of whole tensors, by name


@dataclass(frozen=True)
class Order:
    """Capture what is there after `step`, for the checkpoint `stem` of `generation`. `mode` is CHECKPOINT_SHARDS;
    `kept` are the checkpoints that there are, `dropped` those that were deleted since the last order.
    """

    step: int
    stem: str
    generation: int
    mode: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Why something was not done; `usage` says that it never can be."""

    text: str
    usage: bool = False


@dataclass(frozen=True)
class Written:
    """The end of a share's capture: its file, where this rank wrote that, and for how many seconds changes waited."""

    file: ShardFile | None
    stalled: float


Item = dict[str, Column] | Tensor | Written | Problem  # of a share that is sent: columns, bytes, the end
