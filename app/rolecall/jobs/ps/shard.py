"""A server's shard of the parameters: its gradients, its optimizers, and its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rolecall import Rows, UsageError
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, GradientPart, PartAnswer, TrainerId
from rolecall.jobs.ps.model import VectorPart
from rolecall.jobs.ps.wire import Views, decode, lowest

STEP = "step"  # Adam's count of updates, the one tensor of an optimizer that has no element for each parameter
# tensors by optimizer; a momentum of differences has another name, so it is never loaded as one of gradients
STATES = {"adam": {STEP, "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}, "local": {"outer_momentum_buffer"}}


@dataclass
class _Received:
    """The parts of one gradient, None if the trainer only asks for parameters; the answers due; and its report."""

    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    answers: dict[int, Future[PartAnswer]] = field(default_factory=dict)
    report: BatchReport | None = None  # comes with part 0


class Shard:
    """Holds a copy of the elements of `parts` (index and extent, adjoining) of the model's vector `flat` [total]. The
    optimizer steps one part at a time, so a part's new parameters leave while the next part is updated.

    Any thread may call `receive`; one thread at a time calls the rest. `before(begin, end)` is called before elements
    `begin` to `end` change.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, VectorPart]],
        settings: PsSettings,
        flat: Tensor,
        before: Callable[[int, int], None] = lambda begin, end: None,
    ) -> None:
        self.total, self.before, self._settings = len(flat), before, settings
        self._restored_step: Tensor | None = None  # Adam's count of updates, of all parts
        self.start, self.stop = parts[0][1].start, parts[-1][1].stop
        self.parts = {index: slice(part.start - self.start, part.stop - self.start) for index, part in parts}
        local = settings.update_mode == "local"
        self._lr = settings.outer_lr if local else settings.lr
        self._prefix = "outer_" if local else ""  # of the optimizer's tensors
        self._parameters = {index: nn.Parameter(flat[part.start : part.stop].clone()) for index, part in parts}
        parameters = [*self._parameters.values()]
        if local:
            momentum = settings.outer_momentum
            self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, settings.outer_lr, momentum, nesterov=momentum > 0, fused=True
            )
        else:
            self._optimizer = model.optimizer(parameters, settings)
        self._views = {index: Views(settings.wire_dtype) for index in self.parts}
        self._received: dict[GradientKey, _Received] = {}
        self._lost = set[TrainerId]()
        self._lock = threading.Lock()  # of `_received` and `_lost`

    # ---- what a checkpoint holds

    def rows(self) -> dict[str, Rows]:
        """The shares of the whole vectors [total]: the parameters, and the optimizer's state once it has one. Adam's
        `step` [1] counts updates.
        """
        self._settle()
        columns = {"parameters": [parameter.detach() for parameter in self._parameters.values()]}
        for parameter in self._parameters.values():
            for name, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    columns.setdefault(self._prefix + name, []).append(value)
        return {
            name: Rows((tensors[0].view(1),), 1) if name == STEP else Rows(tuple(tensors), self.total, self.start)
            for name, tensors in columns.items()
        }

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Rows]:
        """The same, with room for what a checkpoint holds. Raises UsageError if it is of another model or OPTIMIZER."""
        require_same_model(shapes, self._settings, self.total)
        names = shapes.keys() - {"parameters"}
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                name.removeprefix(self._prefix): torch.zeros(() if name == STEP else parameter.shape) for name in names
            }
        rows = self.rows()
        if STEP in rows:
            self._restored_step = torch.zeros(1)
            rows[STEP] = Rows((self._restored_step,), 1)
        return rows

    def _settle(self) -> None:
        """Sets each part's count of updates to the one that was restored."""
        if self._restored_step is not None:
            for parameter in self._parameters.values():
                self._optimizer.state[parameter][STEP].fill_(self._restored_step[0])
            self._restored_step = None

    @property
    def flat(self) -> Tensor:
        """A copy of the shard's parameters [elements]."""
        return torch.cat([parameter.detach() for parameter in self._parameters.values()])

    # ---- updates

    def receive(self, message: GradientPart, answer: Future[PartAnswer]) -> bool:
        """Keeps a part of a gradient, as it travels. Returns whether all of this shard's parts of it are here."""
        key, part, gradient, report = message
        with self._lock:
            if key.trainer in self._lost:
                return False  # no caller waits for the answer
            received = self._received.setdefault(key, _Received())
            received.gradients[part], received.answers[part] = gradient, answer
            received.report = report or received.report
            return len(received.gradients) == len(self.parts)

    def report(self, key: GradientKey) -> BatchReport:
        """The trainer's report with a gradient that is here and not yet answered."""
        report = self._received[key].report
        assert report is not None
        return report

    def drop(self, trainer: TrainerId) -> None:
        """Drops what a lost trainer sent, what still arrives from it, and its views."""
        with self._lock:
            self._lost.add(trainer)
            self._received = {key: received for key, received in self._received.items() if key.trainer != trainer}
        for views in self._views.values():
            views.drop(trainer)

    def apply(self, part: int, weights: Mapping[GradientKey, float], rate: float) -> None:
        """One optimizer step of `part` with the weighted sum of the gradients `weights`, at `rate` times LR."""
        parameter, mean, total = self._parameters[part], None, 0.0
        for key, weight in weights.items():
            payload = self._received[key].gradients[part]
            assert payload is not None
            gradient = decode(payload, parameter.numel(), self._settings.wire_dtype)
            total += weight
            # the mean so far moves towards the next gradient, which saves a pass over the memory
            mean = gradient if mean is None else mean.lerp_(gradient, weight / total)
        if mean is not None:
            self._settle()
            self.before(self.parts[part].start, self.parts[part].stop)
            parameter.grad = mean
            group = self._optimizer.param_groups[0]
            group["lr"] = self._lr * rate
            self._optimizer.step()  # of the one part that has a gradient
            parameter.grad = None
            if group.get("momentum") == 0:
                self._optimizer.state.pop(parameter, None)  # momenta of the checkpoint, which are not used

    def answers(
        self, part: int, keys: Collection[GradientKey], assignments: Mapping[GradientKey, Assignment]
    ) -> Iterator[tuple[Future[PartAnswer], PartAnswer]]:
        """The calls for `part` under `keys`, each with its answer; those of part 0 have the assignments."""
        payloads = self._encode(part, keys)
        for key in keys:
            if received := self._received.get(key):
                assignment = assignments.get(key) if part == 0 else None
                yield received.answers.pop(part), PartAnswer(payloads.get(key), assignment)
                if not received.answers:
                    del self._received[key]

    def _encode(self, part: int, keys: Collection[GradientKey]) -> dict[GradientKey, Tensor]:
        """The payloads of `part` for `keys`; see `Receiver`. They are sent later, when the next update may have changed
        the parameters, so `async` sends a copy. In `sync` and `local` the next update waits for all answered trainers.
        """
        parameters, mode = self._parameters[part].detach(), self._settings.update_mode
        if mode == "autograd":
            return {}  # they stay here
        if self._settings.wire_dtype != "float32":
            return self._views[part].encode(parameters, keys)
        return dict.fromkeys(lowest(keys), parameters.clone() if mode == "async" else parameters)


def require_same_model(shapes: Mapping[str, tuple[int, ...]], settings: PsSettings, total: int) -> None:
    """Raises UsageError if a checkpoint's tensors, of these `shapes`, do not fit the model or OPTIMIZER."""
    saved = shapes.get("parameters", (0,))
    if saved != (total,):
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the newest checkpoint in CHECKPOINT_DIR "
            f"{saved[0]}; set what the job was trained with, or another directory"
        )
    local = settings.update_mode == "local"
    if not shapes.keys() - {"parameters"} <= STATES["local" if local else settings.optimizer]:
        chosen = "UPDATE_MODE=local" if local else f"UPDATE_MODE={settings.update_mode} OPTIMIZER={settings.optimizer}"
        raise UsageError(
            f"{chosen}: the newest checkpoint in CHECKPOINT_DIR has another optimizer's state; set what the job was "
            "trained with, or another directory"
        )
