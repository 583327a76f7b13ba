"""What travels: gradients up and parameters down, in WIRE_DTYPE, and with TOP_K only the largest elements.

A part travels as one flat tensor. Whole float32 and bfloat16 have their own type; what is uint8 is packed, see
`wire_blocks` and `wire_sparse`. Gradients carry error feedback. Of packed parameters only the difference from what the
trainer holds travels, so what the packing takes away is in the next difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolecall.jobs.ps import PsSettings, wire_sparse
from rolecall.jobs.ps.wire_blocks import pack, unpack

WHOLE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def is_packed(settings: PsSettings) -> bool:
    """Whether parts travel as bytes, and parameters as differences."""
    return settings.top_k > 0 or settings.wire_dtype not in WHOLE


def has_momentum(settings: PsSettings) -> bool:
    """Whether MOMENTUM is the trainers': with TOP_K, but for UPDATE_MODE=local, whose outer optimizer has its own."""
    return settings.top_k > 0 and settings.update_mode != "local" and settings.momentum > 0


class Sender:
    """Encodes one part of a trainer's gradients. What the encoding takes away is held back and added to the next
    gradient (error feedback: Seide et al. 2014, 1-bit stochastic gradient descent), so it is late, not lost.

    Where `has_momentum`, velocities are summed and held back in place of gradients, and the velocity of an element that
    travels begins again at 0 (momentum correction and factor masking: Lin et al. 2018, deep gradient compression).
    """

    def __init__(self, size: int, settings: PsSettings) -> None:
        self._settings = settings
        self._exact = settings.wire_dtype == "float32" and not settings.top_k
        self._held = torch.zeros(1).expand(size) if self._exact else torch.zeros(size)
        self._velocity = torch.zeros(size) if has_momentum(settings) else None

    @property
    def held(self) -> Tensor:
        """What is held back [size]; zeros where all travels as it is."""
        return self._held

    def encode(self, gradient: Tensor) -> Tensor:
        """`gradient` [size] float32 as it travels, in memory that stays as it is; where all travels, in that of
        `gradient`.
        """
        s, held, velocity = self._settings, self._held, self._velocity
        if self._exact:
            return gradient
        if velocity is not None:
            torch.add(gradient, velocity, alpha=s.momentum, out=velocity)
        held += gradient if velocity is None else velocity
        if s.top_k:
            indices = wire_sparse.largest(held, wire_sparse.count_of(len(held), s.top_k))
            values = held[indices]
            payload = wire_sparse.join(indices, values, s.top_k, s.wire_dtype)
            held.index_add_(0, indices, values, alpha=-1)
            if velocity is not None:
                velocity.index_fill_(0, indices, 0)
            return payload
        decoded = torch.empty_like(held)
        payload = pack(held, s.wire_dtype, decoded)
        held -= decoded
        return payload if is_packed(s) else payload.view(WHOLE[s.wire_dtype])


def decode(payload: Tensor, size: int, settings: PsSettings) -> Tensor:
    """The gradient [size] float32 that `Sender.encode` made `payload` of; the same memory where that is float32."""
    if payload.is_floating_point():
        return payload.float()
    if not settings.top_k:
        return unpack(payload, size, settings.wire_dtype)
    indices, values = wire_sparse.split(payload, settings.top_k, settings.wire_dtype)
    return torch.zeros(size).index_copy_(0, indices, values)


class View:
    """At the server, a part [size] as a trainer holds it: `parameters` to begin with, which it is sent whole."""

    def __init__(self, parameters: Tensor, settings: PsSettings) -> None:
        self._values, self._settings = parameters.clone(), settings

    def encode(self, parameters: Tensor) -> Tensor:
        """The difference from the trainer's part to `parameters` [size], uint8, which the view then has, too."""
        s, difference = self._settings, parameters - self._values
        if not s.top_k:
            payload = pack(difference, s.wire_dtype, difference)
            self._values += difference
            return payload
        indices = wire_sparse.largest(difference, wire_sparse.count_of(len(difference), s.top_k))
        values = difference[indices]
        payload = wire_sparse.join(indices, values, s.top_k, s.wire_dtype)
        self._values.index_add_(0, indices, values)
        return payload

    def copy(self) -> View:
        """A view of a trainer that holds the same so far."""
        return View(self._values, self._settings)


class Receiver:
    """At a trainer, a part [size]."""

    def __init__(self, size: int, settings: PsSettings) -> None:
        self._size, self._settings = size, settings
        self._values = torch.empty(0)

    def receive(self, payload: Tensor) -> Tensor:
        """The part's parameters [size] float32 after `payload`, which are whole (float32, bfloat16) or a difference
        (uint8). The caller must not change them in place; the next ones have other memory.
        """
        if payload.is_floating_point():
            values = payload.float()
        elif self._settings.top_k:
            values = self._values.clone()
            values.index_add_(0, *wire_sparse.split(payload, self._settings.top_k, self._settings.wire_dtype))
        else:
            values = unpack(payload, self._size, self._settings.wire_dtype).add_(self._values)
        if is_packed(self._settings):
            self._values = values
        return values
