"""A server's shard of the parameters: gradients in, one update, parameters out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall.config import UsageError
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.wire import DTYPES

Key = tuple[str, int]  # a trainer's name, and the number of its gradient


@dataclass
class _Held:
    """What came of one gradient: its parts, none where the trainer only said that it is there; and who waits."""

    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    answers: dict[int, Future[Any]] = field(default_factory=dict)


class Shard:
    """Holds the elements of `parts` (index and extent, adjoining) of the model's flat vector, and their optimizers, one
    a part: a part's new parameters can leave while the next part is updated.

    Used from one thread.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], settings: PsSettings) -> None:
        self.start, self.stop = parts[0][1].start, parts[-1][1].stop
        self.parts = {index: slice(part.start - self.start, part.stop - self.start) for index, part in parts}
        self._lr = settings.lr
        self._dtype = DTYPES[settings.wire_dtype]
        self._lockstep = settings.update_mode == "sync"
        # each has memory of its own, which is what RPC sends
        self._parameters = {
            index: nn.Parameter(torch.zeros(extent.stop - extent.start)) for index, extent in self.parts.items()
        }
        self._optimizers = {index: _optimizer(one, settings) for index, one in self._parameters.items()}
        self._held: dict[Key, _Held] = {}

    def load(self, flat: Tensor, optimizer: dict[str, Tensor]) -> None:
        """Take the shard's elements out of the whole `flat` [total], and its share of the optimizer's state."""
        for index, extent in self.parts.items():
            here = slice(self.start + extent.start, self.start + extent.stop)
            self._parameters[index].data.copy_(flat[here])
            if not optimizer:
                continue
            own = {name: value[here].clone() if value.ndim else value.clone() for name, value in optimizer.items()}
            group = self._optimizers[index].state_dict()["param_groups"][0]
            self._optimizers[index].load_state_dict({"state": {0: own}, "param_groups": [group]})

    @property
    def flat(self) -> Tensor:
        """A copy of the shard's parameters [elements]."""
        return torch.cat([parameter.detach() for parameter in self._parameters.values()])

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors: momenta [elements] and the like; those of one number count updates."""
        states = [optimizer.state_dict()["state"].get(0, {}) for optimizer in self._optimizers.values()]
        return join_states([{k: v for k, v in state.items() if isinstance(v, Tensor)} for state in states])

    def put(self, key: Key, part: int, gradient: Tensor | None, answer: Future[Any]) -> bool:
        """Keep a part of a gradient. Returns whether all of this shard's are in."""
        held = self._held.setdefault(key, _Held())
        held.gradients[part], held.answers[part] = gradient, answer
        return len(held.gradients) == len(self.parts)

    def drop(self, trainer: str) -> None:
        """Forget what a lost trainer sent."""
        self._held = {key: held for key, held in self._held.items() if key[0] != trainer}

    def apply(self, part: int, weights: dict[Key, float], rate: float) -> None:
        """One optimizer step of `part` with the weighted sum of the gradients `weights`, at `rate` times LR."""
        parameter, mean, total = self._parameters[part], None, 0.0
        for key, weight in weights.items():
            gradient = self._held[key].gradients[part]
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
        """A part's parameters as they are. RPC sends a tensor later, when the next update may have changed it: so it is
        a copy, but for sync, where all who were sent it answer before there is a next update."""
        return self._parameters[part].detach().to(self._dtype, copy=not self._lockstep)

    def answer(self, part: int, keys: Iterable[Key], copy: Tensor | None, orders: dict[Key, Any]) -> None:
        """Send `copy` to those who wait for `part` under `keys`; with the first part goes what `orders` has."""
        for key in keys:
            if held := self._held.get(key):
                held.answers.pop(part).set_result((copy, orders.get(key) if part == 0 else None))
                if not held.answers:
                    del self._held[key]


def _optimizer(parameter: nn.Parameter, settings: PsSettings) -> torch.optim.Optimizer:
    # fused: one pass over the parameters
    if settings.optimizer == "adam":
        return torch.optim.Adam([parameter], settings.lr, fused=True)
    return torch.optim.SGD([parameter], settings.lr, settings.momentum, fused=True)


def join_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The optimizer states of all shards, in order, as one of the whole vector."""
    return {
        name: torch.cat([state[name] for state in states]) if value.ndim else value for name, value in states[0].items()
    }


def refuse_other(state: dict[str, Any], settings: PsSettings, total: int) -> None:
    """Raise UsageError where a checkpoint is of another model or optimizer than the settings'."""
    found = state["parameters"].numel()
    if found != total:
        raise UsageError(
            f"MODEL={settings.model or 'ConvNet'}: has {total} parameters, the newest checkpoint in CHECKPOINT_DIR "
            f"{found}; set what the job was trained with, or another directory"
        )
    wanted = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[settings.optimizer]
    if state["optimizer"] and not wanted >= set(state["optimizer"]):
        raise UsageError(
            f"OPTIMIZER={settings.optimizer}: the newest checkpoint in CHECKPOINT_DIR is of another one; set what the "
            "job was trained with, or another directory"
        )
