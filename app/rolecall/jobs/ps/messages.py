"""What travels between trainers and servers, and the messages in a server's inbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.futures import Future

Indices = npt.NDArray[np.int64]  # of samples [n]
OptimizerState = dict[str, Tensor]  # by name: [elements], or [] for what counts updates


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
class Assignment:
    """What the lead assigns a trainer: batches to compute, from parameters of `version` on. No batches: the end."""

    version: int
    batches: list[Indices]
    buffers: tuple[Tensor, ...] = ()


class PartAnswer(NamedTuple):
    """The answer to a part of a gradient: the part's new parameters [elements], which UPDATE_MODE=autograd leaves at
    the server, and with the first part the trainer's assignment.
    """

    parameters: Tensor | None
    assignment: Assignment | None


# ---- messages in an inbox


@dataclass(frozen=True)
class ArrivedGradient:
    """A part [elements] of a gradient, at the server that holds its parameters. The first part has the report."""

    key: GradientKey
    part: int
    gradient: Tensor | None
    report: BatchReport | None
    answer: Future[PartAnswer]


@dataclass(frozen=True)
class PartsReceived:
    """At the lead: the server with ordinal `server` has all of its parts of a gradient."""

    server: int
    key: GradientKey


@dataclass(frozen=True)
class UpdateShard:
    """At every server, in the order of `number`: apply the mean of the gradients in `weights`, which add up to 1 (none:
    nothing changes), at `rate` times LR; then send the new parameters to those in `answered`.
    """

    number: int
    weights: dict[GradientKey, float]
    rate: float
    answered: tuple[GradientKey, ...]


@dataclass(frozen=True)
class Restore:
    """Take the shard's elements out of the parameters `flat` [total], and its share of the optimizer's state."""

    flat: Tensor
    optimizer: OptimizerState
    done: Future[None]


@dataclass(frozen=True)
class Fetch:
    """Answer with the shard's parameters [elements] and its optimizer's state, right after update `number`."""

    number: int
    answer: Future[tuple[Tensor, OptimizerState]]


@dataclass(frozen=True)
class TrainerLost:
    """At the lead: a trainer is out of this generation."""

    trainer: str


Message = ArrivedGradient | PartsReceived | UpdateShard | Restore | Fetch | TrainerLost
