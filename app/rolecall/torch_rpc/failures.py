"""Turns what torch raises for a failed call into one of three errors, by its text; what torch or the peer reported is
the cause."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rpc.internal import RemoteException

from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, RemoteTraceback
from rolecall.wire.messages import Deadline

# torch's texts for a late answer and for a broken connection, which have no type of their own
LATE = "RPCErr:1:"
GONE = re.compile(rf"originated at tensorpipe|{LATE}|gloo/transport/|ncclRemoteError")
REMOTE = re.compile(r"On WorkerInfo\(id=\d+, name=(?P<name>\w+)\):(?:\n|\\n)(?P<text>.*)", re.DOTALL)
# source files of the frames between a call and the called function
INNER_FRAMES = r"torch/distributed/rpc/|torch/futures/|rolecall/torch_rpc/(?:tracing|failures)"
FRAMES = re.compile(rf'  File "[^"]*(?:{INNER_FRAMES})[^"]*", line .*\n(?:    .*\n)*')
HEAD = "Traceback (most recent call last):\n"
KINDS: tuple[type[Exception], ...] = (PeerLostError, CallTimeoutError)  # keep their type on their way back


class Answer(torch._C.Future):  # type: ignore[type-arg]  # what `rpc_async` returns
    """The answer of a call. It ends by `set_result` or `fail`; `devices` are those of its tensors."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__([*devices])

    def fail(self, error: Exception, here: str) -> None:
        """Raises `error` at those that wait. If this future answers a call of another peer to the rank `here`, that
        peer gets the error as one that the function raised."""

        def refuse(_: Any) -> NoReturn:
            raise error

        self._set_unwrap_func(refuse)
        # not `set_exception`: torch would pass that on as a value
        remote = f"{error.__cause__}\n\n" if is_remote(error) else ""
        trace = remote + HEAD + "".join(traceback.format_exception_only(error))
        self.set_result(RemoteException(f"On WorkerInfo(id=0, name={here}):\n{error!r}\n{trace}", type(error)))


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


def failure(error: Exception, to: str, method: str, deadline: Deadline) -> Exception:
    """The PeerLostError, CallTimeoutError or RemoteError, with its cause, for the `error` that torch raised for a
    call."""
    failed: Exception
    text = str(error)
    if text.startswith(LATE):
        failed = CallTimeoutError(f"{to} has not answered {method} within {deadline:g} s ({deadline.setting})")
    elif remote := remote_failure(error):
        return remote
    elif GONE.search(text):
        failed = PeerLostError(f"{to} does not answer: {first_line(error)}")
    else:  # of a returned future, of an operator of torch's, or of an answer that cannot be unpickled
        failed = RemoteError(f"{to} failed to answer {method}: {first_line(error)}")
    failed.__cause__ = error.with_traceback(None)  # it has no frames of the user's
    return failed


def remote_failure(error: Exception) -> Exception | None:
    """What a peer's function raised, read from torch's `error`; None for anything else."""
    match = REMOTE.search(str(error))
    if match is None:
        return None
    text = match["text"].partition("\n\nAt:\n")[0]
    if "\n" not in text:  # a KeyError's, which Python escapes
        text = text.replace("\\n", "\n").replace("\\'", "'").removesuffix("'")
    shown, mark, frames = text.partition(HEAD)
    trace = (mark + FRAMES.sub("", frames)).rstrip()
    raised = [line for line in trace.rpartition(HEAD)[2].splitlines() if line and not line.startswith(" ")]
    what = raised[0] if raised else shown.strip().partition("\n")[0]
    kind = next((kind for kind in KINDS if what.startswith(f"{kind.__module__}.{kind.__name__}")), RemoteError)
    if kind is RemoteError and GONE.search("\n".join(raised)):
        kind = PeerLostError
    failed = kind(f"{match['name']} raised {what}")
    failed.__cause__ = RemoteTraceback(trace or text)
    return failed


def is_remote(error: BaseException) -> bool:
    """Whether a peer reported the error, of itself or of another."""
    return isinstance(error.__cause__, RemoteTraceback)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type's name."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
