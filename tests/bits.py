"""Whether two runs have come to the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rolecall.checkpoint.checkpoint import Snapshot


def digest(snapshot: Snapshot) -> str:
    """SHA-256 of all tensors of a checkpoint, their names and types: weights, optimizers' states, shards."""
    found = hashlib.sha256()
    for name, tensor in sorted(_tensors("", snapshot.state), key=lambda each: each[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}/{key}", each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _tensors(f"{name}/{place}", each)
