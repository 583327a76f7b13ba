"""What travels: gradients up and parameters down, in WIRE_DTYPE.

A part travels as one flat tensor: float32 as it is, int8 and int4 packed into bytes (uint8). Packed gradients carry
error feedback. Of packed parameters only the difference from what the trainer holds travels, so the next difference
makes up for the rounding of this one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rolecall.jobs.ps.messages import GradientKey, TrainerId
from rolecall.jobs.support import pack, unpack


class Sender:
    """Encodes one part of a trainer's gradients. `held` [size] is what the encoding rounded away; it is added to the
    next gradient (error feedback: Seide et al. 2014, 1-bit stochastic gradient descent).
    """

    def __init__(self, size: int, dtype: str) -> None:
        self._dtype = dtype
        self.held = torch.zeros(1).expand(size) if dtype == "float32" else torch.zeros(size)

    def encode(self, gradient: Tensor) -> Tensor:
        """`gradient` [size] float32 as it travels. In float32 it is the same tensor."""
        if self._dtype == "float32":
            return gradient
        self.held += gradient
        payload, decoded = pack(self.held, self._dtype)
        self.held -= decoded
        return payload


def decode(payload: Tensor, size: int, dtype: str) -> Tensor:
    """The gradient [size] float32 of a payload of `Sender.encode`. In float32 it is the same tensor."""
    return payload if dtype == "float32" else unpack(payload, size, dtype)


def lowest(keys: Iterable[GradientKey]) -> list[GradientKey]:
    """Of each trainer the lowest of `keys`: its answer has the parameters."""
    return [*{key.trainer: key for key in sorted(keys, key=lambda key: -key.number)}.values()]


class Views:
    """At a server: what each trainer holds of one part. A difference is encoded once for all trainers with the same
    view: those that were always answered together.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._views: dict[TrainerId, Tensor] = {}

    def __len__(self) -> int:
        return len(set(map(id, self._views.values())))

    def encode(self, parameters: Tensor, keys: Iterable[GradientKey]) -> dict[GradientKey, Tensor]:
        """The payloads for `keys`: all of `parameters` [size] in float32 for gradient 0, then differences. A trainer
        with several keys gets one payload, with its lowest number; a trainer that was dropped gets none.
        """
        payloads: dict[GradientKey, Tensor] = {}
        encoded: dict[int | None, tuple[Tensor, Tensor]] = {}  # by view: payload, next view
        before = dict(self._views)
        for key in lowest(keys):
            trainer = key.trainer
            view = before.get(trainer) if key.number else None
            if key.number and view is None:
                continue
            group = None if view is None else id(view)
            if group not in encoded:
                encoded[group] = self._encode(parameters, view)
            payloads[key], self._views[trainer] = encoded[group]
        return payloads

    def _encode(self, parameters: Tensor, view: Tensor | None) -> tuple[Tensor, Tensor]:
        if view is None:
            return parameters.clone(), parameters.clone()
        payload, decoded = pack(parameters - view, self._dtype)
        return payload, view + decoded

    def drop(self, trainer: TrainerId) -> None:
        """Drops the view of a lost trainer."""
        self._views.pop(trainer, None)


class Receiver:
    """At a trainer: decodes one part [size] of the parameters."""

    def __init__(self, size: int, dtype: str) -> None:
        self._size, self._dtype = size, dtype
        self._values = torch.empty(0)

    def receive(self, payload: Tensor) -> Tensor:
        """The part's parameters [size] float32 after `payload`, which is whole (float32) or a difference (uint8). The
        caller must not change them in place; the next ones have other memory.
        """
        if not payload.is_floating_point():
            payload = unpack(payload, self._size, self._dtype).add_(self._values)
        if self._dtype != "float32":
            self._values = payload
        return payload
