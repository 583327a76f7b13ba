"""What a version consists of: its identity, its tensors in one buffer, and its chunks' digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rolecall.errors import UsageError
from rolecall.weights.packing import pack, packed_bytes, unpack

CHUNK_BYTES = 64 * 1024  # that travel or do not; a smaller chunk saves more of scattered changes, with more digests
DIGEST_BYTES = 16
ALIGNMENT = 64  # bytes, of each tensor in the buffer
NARROW = (torch.bfloat16, torch.int8)  # types in which floating tensors may travel


class VersionId(NamedTuple):
    """Orders the versions of a name: a later one is newer, whatever number its publisher gave it. `number` counts the
    publications of that name in the `generation`, by whomever; rank 0 counts them."""

    generation: int
    number: int
    publisher: str


class Entry(NamedTuple):
    """A tensor in a version's buffer, from the byte `offset` on: `stored` is its type there. What was narrowed to int8
    is packed (packing.py)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def packed(self) -> bool:
        """Whether it was narrowed to int8."""
        return self.stored == torch.int8 != self.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes in the buffer."""
        return packed_bytes(self.numel, "int8") if self.packed else self.numel * self.stored.itemsize


class Manifest(NamedTuple):
    """A version: `nbytes` in chunks, of which `digests` has the digests one after the other. `full_nbytes` is the size
    of its tensors in their own types."""

    version_id: VersionId
    version: int
    entries: tuple[Entry, ...]
    nbytes: int
    full_nbytes: int
    digests: bytes

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.nbytes // CHUNK_BYTES)

    def digest(self, chunk: int) -> bytes:
        """The digest of a chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]


def digest_of(chunk: memoryview) -> bytes:
    """The digest of a chunk's bytes."""
    return hashlib.sha256(chunk).digest()[:DIGEST_BYTES]


def digests_of(buffer: memoryview) -> bytes:
    """The digests of all chunks of a buffer."""
    return b"".join(digest_of(buffer[start : start + CHUNK_BYTES]) for start in range(0, len(buffer), CHUNK_BYTES))


# ---- tensors in a buffer


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
