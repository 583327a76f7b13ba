"""Messages between rank 0 and the ranks that hold shares of a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rolecall.checkpoint.shardfile import Column, ShardFile


@dataclass(frozen=True)
class Order:
    """Requests a capture of the state after `step`, for the checkpoint `stem` of `generation`. `mode` is
    CHECKPOINT_SHARDS; `kept` are the existing checkpoints, `dropped` those deleted since the last order. `whole`
    forbids the use of files of earlier checkpoints; `drain`: the generation ends with this checkpoint.
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
    """Why a request failed; `usage` marks a problem that a retry cannot solve."""

    text: str
    usage: bool = False


@dataclass(frozen=True)
class Earlier:
    """Files of the earlier checkpoint `stem` that are part of the new one; `shared`: they are linked in its folder."""

    stem: str
    names: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Begin:
    """The head of a share's file; its bytes follow."""

    name: str
    columns: dict[str, Column]


@dataclass(frozen=True)
class Written:
    """The end of a capture: the files that this rank wrote, and the seconds that updates waited."""

    files: list[ShardFile]
    stalled: float


Item = Earlier | Begin | Tensor | Written | Problem  # of a share on its way to rank 0
