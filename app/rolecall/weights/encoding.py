"""Tensors in one buffer: where each is, in which type it travels, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rolecall.errors import UsageError
from rolecall.weights.manifest import Entry
from rolecall.weights.packing import pack, unpack

ALIGNMENT = 64  # bytes, of each tensor in the buffer
NARROW = (torch.bfloat16, torch.int8)  # types in which floating tensors may travel


def layout(name: str, tensors: Mapping[str, Any], dtype: torch.dtype | None) -> tuple[tuple[Entry, ...], int]:
    """Where the `tensors` are in a buffer, in which floating ones have the type `dtype` if it is narrower, and its
    size. Tensors that share their memory are there once. Raises UsageError for what cannot travel."""
    if dtype not in (None, *NARROW):
        allowed = ", ".join(str(each) for each in NARROW)
        raise UsageError(f"weights {name!r}: dtype={dtype} is not supported; use one of {allowed}, or leave it out")
    if not isinstance(tensors, Mapping) or not tensors:
        raise UsageError(f"weights {name!r}: publish a mapping of names to tensors, such as model.state_dict()")
    entries, offset, seen = list[Entry](), 0, dict[tuple[Any, ...], int]()
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            what = type(tensor).__name__
            raise UsageError(f"weights {name!r}: {key!r} is a {what}, not a tensor; leave it out")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"weights {name!r}: {key!r} is sparse, quantized or on no device; convert it")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        entry = Entry(str(key), tuple(tensor.shape), tensor.dtype, tensor.dtype, seen.get(place, offset))
        # vectors do not become int8: they are small, and their elements differ much (biases, scales of norms)
        if dtype is not None and tensor.is_floating_point() and (dtype != torch.int8 or tensor.dim() > 1):
            entry = min(entry, entry._replace(stored=dtype), key=lambda each: each.nbytes)
        entries.append(entry)
        if tensor.numel() and place not in seen:
            seen[place] = offset
            offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries), offset


def write(tensors: Mapping[str, torch.Tensor], entries: tuple[Entry, ...], buffer: np.ndarray) -> None:
    """Copies the tensors into the buffer."""
    written = set[int]()
    with torch.no_grad():
        for entry in entries:
            if entry.offset in written or not entry.numel:
                continue
            written.add(entry.offset)
            tensor, stored = tensors[entry.name].detach(), _bytes(entry, buffer)
            if entry.packed:
                stored.copy_(pack(tensor.to("cpu", torch.float32).reshape(-1), "int8")[0])
            else:
                stored.view(entry.stored).view(entry.shape).copy_(tensor)


def read(entry: Entry, buffer: np.ndarray) -> torch.Tensor:
    """The tensor in its own type: a view of the buffer, or, if it travelled as another type, a new one."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype)
    stored = _bytes(entry, buffer)
    values = unpack(stored, entry.numel, "int8") if entry.packed else stored.view(entry.stored)
    return values.view(entry.shape).to(entry.dtype)


def _bytes(entry: Entry, buffer: np.ndarray) -> torch.Tensor:
    """The bytes of an entry, a view of the buffer."""
    return torch.from_numpy(buffer)[entry.offset : entry.offset + entry.nbytes]
