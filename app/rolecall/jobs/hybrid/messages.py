"""Messages: commands of the master to the trainers, their answers, and exchanges of trainers with servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from torch import Tensor

from rolecall.jobs.hybrid.table import BagArrays

EVALUATION_BATCH = 512  # samples


class DenseState(TypedDict):
    """The `state_dict` of the dense network and of its optimizer, on the CPU."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class DescribeData:
    """Requests the `DataDescription` of the trainer's samples."""


@dataclass(frozen=True)
class DataDescription:
    """Numbers of training samples, of test samples and of classes; `digest` identifies the data."""

    samples: int
    tests: int
    classes: int
    digest: str


@dataclass(frozen=True)
class Join:
    """Builds the dense network after `step` steps from `dense`; None: with initial weights."""

    step: int
    dense: DenseState | None


@dataclass(frozen=True)
class TrainSteps:
    """Trains on the sample numbers `samples` [n] int64: `counts[i]` of them in step i, which has `totals[i]` over all
    trainers. The answer is a `StepsResult`, which has the state of the dense network if `with_dense` is set.
    """

    samples: Tensor
    counts: list[int]
    totals: list[int]
    with_dense: bool


@dataclass(frozen=True)
class StepsResult:
    """The loss, summed over this trainer's samples, and the dense network after the last step if it was requested."""

    loss: float
    dense: DenseState | None


@dataclass(frozen=True)
class Evaluate:
    """Requests the number of correctly classified samples in the trainer's share of the test samples."""


@dataclass(frozen=True)
class Exchange:
    """Sent by a trainer to a server: the `gradient` [bags, width] of its pooled vectors, for the update that makes step
    `step`, and its `bags` of the step after that; either may be missing. `later` are rows [n] of further steps, which a
    table on disk reads ahead.
    """

    step: int
    trainer: int
    gradient: np.ndarray | None
    bags: BagArrays | None
    later: np.ndarray | None


Command = DescribeData | Join | TrainSteps | Evaluate
