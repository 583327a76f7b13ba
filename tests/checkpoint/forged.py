"""Checkpoints as somebody else may write them: with a valid checksum, and anything inside."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from rolecall.checkpoint import checkpoint

NAME = "checkpoint-000001-0000000001.pt"


def packed(content: Any) -> bytes:
    """`content` as torch saves it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write(folder: Path, job: str, content: Any, listed: Any = None, **head: Any) -> Path:
    """A checkpoint of `content`, which is saved unless it is bytes, and of `listed` shards; `head` is for its first
    line.
    """
    folder.mkdir(exist_ok=True)
    body = content if isinstance(content, bytes) else packed(content)
    shards = b"" if listed is None else json.dumps(listed).encode()
    first = {
        "format": checkpoint.FORMAT,
        "job": job,
        "generation": 1,
        "step": 1,
        "length": len(body) + len(shards),
        **({} if listed is None else {"manifest": len(shards)}),
        **head,
    }
    first["sha256"] = checkpoint.digest_of(first, (body, shards))
    path = folder / NAME
    path.write_bytes(json.dumps(first).encode() + b"\n" + body + shards)
    return path
