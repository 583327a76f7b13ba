"""A server's shard of the parameters: gradients in, one update, parameters out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, OptimizerState, PartAnswer
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.wire import DTYPES

STATES = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}  # by OPTIMIZER, its tensors


@dataclass
class _Received:
    """The parts of one gradient, which have no elements where the trainer only asks for parameters; and who waits."""

    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    answers: dict[int, Future[PartAnswer]] = field(default_factory=dict)
    report: BatchReport | None = None  # came with the first part


class Shard:
    """Holds the elements of `parts` (index and extent, adjoining) of the model's flat vector, and their optimizers, one
    a part: a part's new parameters can leave while the next part is updated.

    Any thread may `receive`; the rest is done by one thread at a time.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], settings: PsSettings) -> None:
        self.start, self.stop = parts[0][1].start, parts[-1][1].stop
        self.parts = {index: slice(part.start - self.start, part.stop - self.start) for index, part in parts}
        self._lr = settings.lr
        self._dtype = DTYPES[settings.wire_dtype]
        self._sync = settings.update_mode == "sync"
        # each has memory of its own, which is what RPC sends
        self._parameters = {
            index: nn.Parameter(torch.zeros(extent.stop - extent.start)) for index, extent in self.parts.items()
        }
        self._optimizers = {index: _optimizer(one, settings) for index, one in self._parameters.items()}
        self._received: dict[GradientKey, _Received] = {}
        self._lock = threading.Lock()  # of `_received`

    def load(self, flat: Tensor, optimizer: OptimizerState) -> None:
        """Takes the shard's elements out of the whole `flat` [total], and its share of the optimizer's state."""
        for index, extent in self.parts.items():
            rows = slice(self.start + extent.start, self.start + extent.stop)
            self._parameters[index].data.copy_(flat[rows])
            if optimizer:
                state = {
                    name: value[rows].clone() if value.ndim else value.clone() for name, value in optimizer.items()
                }
                group = self._optimizers[index].state_dict()["param_groups"][0]
                self._optimizers[index].load_state_dict({"state": {0: state}, "param_groups": [group]})

    @property
    def flat(self) -> Tensor:
        """A copy of the shard's parameters [elements]."""
        return torch.cat([parameter.detach() for parameter in self._parameters.values()])

    def optimizer_state(self) -> OptimizerState:
        """The optimizer's tensors: momenta [elements] and the like; those of one number count updates."""
        states = [optimizer.state_dict()["state"].get(0, {}) for optimizer in self._optimizers.values()]
        return join_states([{k: v for k, v in state.items() if isinstance(v, Tensor)} for state in states])

    def receive(
        self,
        key: GradientKey,
        part: int,
        gradient: Tensor | None,
        answer: Future[PartAnswer],
        report: BatchReport | None = None,
    ) -> bool:
        """Keeps a part [elements] of a gradient. Returns whether all of this shard's parts of it are here."""
        with self._lock:
            received = self._received.setdefault(key, _Received())
            received.gradients[part], received.answers[part] = gradient, answer
            received.report = report or received.report
            return len(received.gradients) == len(self.parts)

    def report(self, key: GradientKey) -> BatchReport:
        """What the trainer reports with a gradient that is here and not yet answered."""
        report = self._received[key].report
        assert report is not None
        return report

    def drop(self, trainer: str) -> None:
        """Drops what a lost trainer sent."""
        with self._lock:
            self._received = {key: received for key, received in self._received.items() if key.trainer != trainer}

    def apply(self, part: int, weights: Mapping[GradientKey, float], rate: float) -> None:
        """One optimizer step of `part` with the weighted sum of the gradients `weights`, at `rate` times LR."""
        parameter, mean, total = self._parameters[part], None, 0.0
        for key, weight in weights.items():
            gradient = self._received[key].gradients[part]
            assert gradient is not None
            total += weight
            # the mean so far moves towards the next: one pass less than a sum of weighted gradients takes
            mean = gradient.float() if mean is None else mean.lerp_(gradient.float(), weight / total)
        if mean is not None:
            parameter.grad = mean
            self._optimizers[part].param_groups[0]["lr"] = self._lr * rate
            self._optimizers[part].step()
            parameter.grad = None

    def copy(self, part: int) -> Tensor:
        """A part's parameters [elements] in WIRE_DTYPE. RPC sends a tensor later, when the next update may have changed
        it: so it is a copy, but for sync, where all who were sent it answer before there is a next update.
        """
        return self._parameters[part].detach().to(self._dtype, copy=not self._sync)

    def answer(
        self,
        part: int,
        keys: Iterable[GradientKey],
        parameters: Tensor | None,
        assignments: Mapping[GradientKey, Assignment],
    ) -> None:
        """Sends `parameters` [elements] to those who wait for `part` under `keys`, part 0 with their assignments."""
        for key in keys:
            if received := self._received.get(key):
                assignment = assignments.get(key) if part == 0 else None
                received.answers.pop(part).set_result(PartAnswer(parameters, assignment))
                if not received.answers:
                    del self._received[key]


def _optimizer(parameter: nn.Parameter, settings: PsSettings) -> torch.optim.Optimizer:
    # fused: one pass over the parameters
    if settings.optimizer == "adam":
        return torch.optim.Adam([parameter], settings.lr, fused=True)
    return torch.optim.SGD([parameter], settings.lr, settings.momentum, fused=True)


def join_states(states: Sequence[OptimizerState]) -> OptimizerState:
    """The optimizer states of all shards, in order, as one of the whole vector."""
    return {
        name: torch.cat([state[name] for state in states]) if value.ndim else value for name, value in states[0].items()
    }


def require_same_model(flat: Tensor, optimizer: OptimizerState, settings: PsSettings, total: int) -> None:
    """Raises UsageError where a checkpoint's parameters `flat` do not fit the model or OPTIMIZER."""
    if len(flat) != total:
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the newest checkpoint in CHECKPOINT_DIR "
            f"{len(flat)}; set what the job was trained with, or another directory"
        )
    if not optimizer.keys() <= STATES[settings.optimizer]:
        raise UsageError(
            f"OPTIMIZER={settings.optimizer}: the newest checkpoint in CHECKPOINT_DIR was made with another one; set "
            "what the job was trained with, or another directory"
        )
