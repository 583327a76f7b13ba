"""What travels between trainers and servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Indices = npt.NDArray[np.int64]  # of samples [n]


class GradientKey(NamedTuple):
    """A gradient: its trainer's name, and its number among the trainer's gradients of this generation, from 0.

    Number 0 has no elements: with it a trainer asks for its first parameters.
    """

    trainer: str
    number: int


@dataclass(frozen=True)
class BatchReport:
    """What a trainer reports with a gradient: the `version` of the parameters that it was computed with, and, of its
    `samples` samples, the mean loss, how many were classified correctly, and the model's buffers afterwards.
    """

    version: int
    samples: int
    loss: float = 0.0
    correct: int = 0
    buffers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class UpdateShard:
    """At every server, one at a time: apply the mean of the gradients in `weights`, which add up to 1 (none: nothing
    changes), at `rate` times LR, which makes the parameters of `version`; then send them to those in `answered`. First
    drop what the trainers `lost` left.
    """

    version: int
    weights: dict[GradientKey, float]
    rate: float
    answered: tuple[GradientKey, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """What the lead assigns a trainer: batches to compute, from parameters of `version` on. No batches: the end. `rate`
    is that of its own optimizer, over LR (UPDATE_MODE=local).
    """

    version: int
    batches: list[Indices]
    buffers: tuple[Tensor, ...] = ()
    rate: float = 1.0


class Working(NamedTuple):
    """A trainer makes steps of the round that ends with its gradient `number`, and takes longer than one gradient."""

    trainer: str
    number: int


class PartAnswer(NamedTuple):
    """The answer to a part of a gradient: the part's new parameters as they travel (see `wire.Receiver`), none where
    they are unchanged or UPDATE_MODE=autograd leaves them at the server; and with the first part the trainer's
    assignment.
    """

    parameters: Tensor | None
    assignment: Assignment | None
