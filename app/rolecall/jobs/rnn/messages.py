"""What travels between the trainer and the ps, beside tensors, and how a checkpoint is laid out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

OptimizerState = dict[str, Any]


@dataclass
class Counters:
    """How far training has come."""

    epoch: int = 0  # completed epochs
    position: int = 0  # steps of this epoch
    step: int = 0  # steps of all epochs
    history: list[list[float]] = field(default_factory=list)  # by epoch: mean training loss, mean validation loss
    loss: float = 0.0  # summed over this epoch's tokens so far
    tokens: int = 0  # of this epoch so far


@dataclass(frozen=True)
class TrainerState:
    """The trainer's part of a checkpoint. `state` is the LSTM's hidden and cell state, [layers, batch, hidden] each."""

    counters: Counters
    lstm: dict[str, Tensor]
    optimizers: list[OptimizerState]
    state: list[Tensor]
    rng: Tensor
    vocabulary: list[str]
    digest: str

    def checkpoint(self, weights: dict[str, Any], optimizers: list[OptimizerState]) -> dict[str, Any]:
        """The checkpoint of both ranks, given the weights by module and the optimizers' states of the ps."""
        return {
            **asdict(self.counters),
            "weights": {"lstm": self.lstm, **weights},
            "optimizers": {"trainer": self.optimizers, "ps": optimizers},
            "state": self.state,
            "rng": self.rng,
            "vocabulary": self.vocabulary,
            "digest": self.digest,
        }

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> TrainerState:
        """The trainer's part of a checkpoint's state."""
        return cls(
            counters=Counters(**{entry.name: checkpoint[entry.name] for entry in fields(Counters)}),
            lstm=checkpoint["weights"]["lstm"],
            optimizers=checkpoint["optimizers"]["trainer"],
            **{name: checkpoint[name] for name in ("state", "rng", "vocabulary", "digest")},
        )


@dataclass(frozen=True)
class SaveRequest:
    """Asks for a checkpoint, the job's last one where `final`; `optimizers` are references to those of the ps."""

    trainer: TrainerState
    optimizers: list[Any]
    final: bool


@dataclass(frozen=True)
class ClipResult:
    """The global norm of a step's gradient before clipping, and whether a checkpoint is due after the step."""

    norm: float
    checkpoint_due: bool
