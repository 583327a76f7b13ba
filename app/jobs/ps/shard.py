"""A server's shard of the parameters: gradients in, one update, parameters out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from app.config import UsageError
from app.jobs.ps import PsSettings
from app.jobs.ps.model import Part
from app.jobs.ps.wire import DTYPES

Key = tuple[str, int]  # a trainer's name, and the number of its gradient


@dataclass
class _Held:
    """What came of one gradient: its parts, none where the trainer only said that it is there; and who waits."""

    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    answers: dict[int, Future[Any]] = field(default_factory=dict)


class Shard:
    """Holds the elements of `parts` (index and extent, adjoining) of the model's flat vector, and their optimizer.

    Used from one thread.
    """

    def __init__(self, parts: Sequence[tuple[int, Part]], settings: PsSettings) -> None:
        self.start, self.stop = parts[0][1].start, parts[-1][1].stop
        self.parts = {index: slice(part.start - self.start, part.stop - self.start) for index, part in parts}
        self.flat = nn.Parameter(torch.zeros(self.stop - self.start))
        self.flat.grad = torch.zeros_like(self.flat)
        self._lr = settings.lr
        self._dtype = DTYPES[settings.wire_dtype]
        # fused: one pass over the parameters
        self._optimizer: torch.optim.Optimizer
        if settings.optimizer == "adam":
            self._optimizer = torch.optim.Adam([self.flat], settings.lr, fused=True)
        else:
            self._optimizer = torch.optim.SGD([self.flat], settings.lr, settings.momentum, fused=True)
        self._held: dict[Key, _Held] = {}

    def load(self, flat: Tensor, optimizer: dict[str, Tensor]) -> None:
        """Take the shard's elements out of the whole `flat` [total], and its share of the optimizer's state."""
        with torch.no_grad():
            self.flat.copy_(flat[self.start : self.stop])
        if not optimizer:
            return
        own = {
            name: value[self.start : self.stop].clone() if value.shape == flat.shape else value
            for name, value in optimizer.items()
        }
        group = {**self._optimizer.state_dict()["param_groups"][0], "params": [0]}
        self._optimizer.load_state_dict({"state": {0: own}, "param_groups": [group]})

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors: momenta [elements] and the like."""
        state: dict[str, Tensor] = self._optimizer.state_dict()["state"].get(0, {})
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def put(self, key: Key, part: int, gradient: Tensor | None, answer: Future[Any]) -> bool:
        """Keep a part of a gradient. Returns whether all of this shard's are in."""
        held = self._held.setdefault(key, _Held())
        held.gradients[part], held.answers[part] = gradient, answer
        return len(held.gradients) == len(self.parts)

    def drop(self, trainer: str) -> None:
        """Forget what a lost trainer sent."""
        self._held = {key: held for key, held in self._held.items() if key[0] != trainer}

    def apply(self, weights: dict[Key, float], rate: float) -> None:
        """One optimizer step with the weighted sum of the gradients `weights`, at `rate` times LR."""
        if not weights:
            return
        assert self.flat.grad is not None
        for number, (key, weight) in enumerate(weights.items()):
            for index, extent in self.parts.items():
                gradient = self._held[key].gradients[index]
                assert gradient is not None
                if number == 0:
                    torch.mul(gradient, weight, out=self.flat.grad[extent])
                else:
                    self.flat.grad[extent].add_(gradient, alpha=weight)
        self._optimizer.param_groups[0]["lr"] = self._lr * rate
        self._optimizer.step()

    def copies(self) -> dict[int, Tensor | None]:
        """The parameters as they are, by part. RPC sends a tensor's whole memory, and sends it later: so each part has
        its own, which nobody changes."""
        return {index: self.flat.detach()[extent].to(self._dtype, copy=True) for index, extent in self.parts.items()}

    def answer(self, keys: Iterable[Key], orders: dict[Key, Any], copies: dict[int, Tensor | None]) -> None:
        """Send `copies` to those who wait under `keys`; with the first part goes what `orders` has for them."""
        waiting = [(key, held) for key in keys if (held := self._held.pop(key, None))]
        for index, copy in copies.items():
            for key, held in waiting:
                held.answers[index].set_result((copy, orders.get(key) if index == 0 else None))


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
