"""Messages between trainers and servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rolecall import Peer

Indices = npt.NDArray[np.int64]  # of samples [n]


class TrainerId(NamedTuple):
    """A trainer's part in a generation. The same trainer has another one in the next generation, and if it joins again
    after a loss, so nothing that it sent before counts then.
    """

    name: str
    generation: int
    join: int

    @classmethod
    def of(cls, peer: Peer, generation: int) -> Self:
        """The part of `peer` in `generation`."""
        return cls(peer.name, generation, peer.join)


class GradientKey(NamedTuple):
    """A gradient: its trainer, and its number among the gradients of that part of the trainer, from 0.

    Number 0 has no elements: with it a trainer asks for its first parameters.
    """

    trainer: TrainerId
    number: int


@dataclass(frozen=True)
class BatchReport:
    """A trainer's report with a gradient: the `version` of the parameters that it was computed with, and, of its
    `samples` samples, the mean loss, how many were classified correctly, and the model's buffers afterwards.
    """

    version: int
    samples: int
    loss: float = 0.0
    correct: int = 0
    buffers: tuple[Tensor, ...] = ()


class GradientPart(NamedTuple):
    """Part `part` of the gradient `key`, encoded by `wire.Sender`; None if the trainer asks for parameters. Part 0
    has the report.
    """

    key: GradientKey
    part: int
    gradient: Tensor | None
    report: BatchReport | None


@dataclass(frozen=True)
class UpdateShard:
    """The lead's order to every server, one at a time: drop what the trainers `lost` sent; apply the mean of the
    gradients in `weights`, which add up to 1 (empty: nothing changes), at `rate` times LR, which makes the parameters
    of `version`; send them to the trainers in `answered`.
    """

    version: int
    weights: dict[GradientKey, float]
    rate: float
    answered: tuple[GradientKey, ...]
    lost: tuple[TrainerId, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """Batches for a trainer to compute, from parameters of `version` on; no batches: the end. `rate` times LR is
    the learning rate of the trainer (UPDATE_MODE=local).
    """

    version: int
    batches: list[Indices]
    buffers: tuple[Tensor, ...] = ()
    rate: float = 1.0


class Working(NamedTuple):
    """A trainer makes steps of the round that ends with its gradient `number`."""

    trainer: TrainerId
    number: int


class PartAnswer(NamedTuple):
    """The answer to a part of a gradient: its new parameters, encoded for `wire.Receiver`, or None if the
    trainer has them already or UPDATE_MODE=autograd keeps them at the server; and with part 0 the trainer's assignment.
    """

    parameters: Tensor | None
    assignment: Assignment | None
