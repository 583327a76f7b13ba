"""What a version consists of: its identity, its tensors, and its chunks' digests."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch

from rolecall.weights.packing import packed_bytes

CHUNK_BYTES = 64 * 1024  # that travel or do not; a smaller chunk saves more of scattered changes, with more digests
DIGEST_BYTES = 16


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
