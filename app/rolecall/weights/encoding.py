"""Tensors in one buffer: where each is, in which type it travels, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rolecall.errors import UsageError
from rolecall.weights.manifest import Entry

ALIGNMENT = 64  # bytes, of each tensor in the buffer
NARROW = (torch.bfloat16, torch.int8)  # types in which floating tensors may travel
INT8_LIMIT = 127


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
        stored = dtype if dtype is not None and _may_narrow(tensor, dtype) else tensor.dtype
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        entry = Entry(str(key), tuple(tensor.shape), tensor.dtype, stored, seen.get(place, offset))
        entries.append(entry)
        if tensor.numel() and place not in seen:
            seen[place] = offset
            offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries), offset


def _may_narrow(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Vectors do not become int8: they are small, and their elements differ much (biases, scales of norms)."""
    narrower = tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize
    return narrower and (dtype != torch.int8 or tensor.dim() > 1)


def write(tensors: Mapping[str, torch.Tensor], entries: tuple[Entry, ...], buffer: np.ndarray) -> None:
    """Copies the tensors into the buffer."""
    written = set[int]()
    with torch.no_grad():
        for entry in entries:
            if entry.offset in written or not entry.numel:
                continue
            written.add(entry.offset)
            tensor = tensors[entry.name].detach()
            scales, stored = _parts(entry, buffer)
            if scales is None:
                stored.copy_(tensor)
                continue
            rows = tensor.to("cpu", torch.float32).reshape(entry.rows, -1)
            scales.copy_(rows.abs().amax(1) / INT8_LIMIT)
            divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
            quantized = (rows / divisors).round_().clamp_(-INT8_LIMIT, INT8_LIMIT)
            stored.copy_(quantized.view(entry.shape))


def read(entry: Entry, buffer: np.ndarray) -> torch.Tensor:
    """The tensor in its own type: a view of the buffer, or, if it travelled as another type, a new one."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype)
    scales, stored = _parts(entry, buffer)
    if scales is None:
        return stored.to(entry.dtype)
    rows = stored.view(entry.rows, -1).to(torch.float32) * scales.unsqueeze(1)
    return rows.view(entry.shape).to(entry.dtype)


def _parts(entry: Entry, buffer: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The scales of an int8 entry, and its stored elements, as views of the buffer."""
    flat = torch.from_numpy(buffer)
    start, end = entry.offset + entry.rows * 4, entry.offset + entry.nbytes
    stored = flat[start:end].view(entry.stored).view(entry.shape)
    return (flat[entry.offset : start].view(torch.float32) if entry.rows else None), stored
