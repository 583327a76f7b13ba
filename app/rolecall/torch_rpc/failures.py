"""Tells by its text whether what torch raised means that a peer is gone: torch has no type for it."""

from __future__ import annotations

import re

import torch.distributed as dist

from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError

# torch's texts for a late answer and for a broken connection
GONE = re.compile(r"originated at tensorpipe|RPCErr:1:|gloo/transport/|ncclRemoteError")


def is_lost(error: BaseException) -> bool:
    """Whether `error` means that a peer is gone or silent, seen here or by a called peer, or that the store is, which
    rank 0's worker serves."""
    if isinstance(error, PeerLostError | dist.DistNetworkError):
        return True
    if isinstance(error, CallTimeoutError):
        return False
    if isinstance(error, RemoteError):  # of a peer whose own call of torch's failed
        return error.__cause__ is not None and is_lost(error.__cause__)
    return isinstance(error, RuntimeError) and bool(GONE.search(str(error)))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type's name."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
