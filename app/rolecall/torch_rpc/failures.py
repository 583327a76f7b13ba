"""How a call fails: one of three types, read from torch's texts, and with what the peer said as the cause."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rpc.internal import RemoteException

from rolecall.context.pace import Deadline
from rolecall.errors import CallTimeoutError, PeerLostError, RemoteError, RemoteTraceback

# what torch says, without a type of its own, of a peer whose connection broke or whose answer did not come in time
LATE = "RPCErr:1:"
GONE = re.compile(rf"originated at tensorpipe|{LATE}|gloo/transport/|ncclRemoteError")
REMOTE = re.compile(r"On WorkerInfo\(id=\d+, name=(?P<name>\w+)\):(?:\n|\\n)(?P<text>.*)", re.DOTALL)
# frames between a call and the function that is called, and their source
BETWEEN = r"torch/distributed/rpc/|torch/futures/|rolecall/torch_rpc/(?:tracing|failures)"
FRAMES = re.compile(rf'  File "[^"]*(?:{BETWEEN})[^"]*", line .*\n(?:    .*\n)*')
HEAD = "Traceback (most recent call last):\n"
KINDS: tuple[type[Exception], ...] = (PeerLostError, CallTimeoutError)  # that stay what they are on their way back


class Answer(torch._C.Future):  # type: ignore[type-arg]  # what `rpc_async` returns
    """The answer of a call, for which `fail` may be called in place of `set_result`; `devices` are those of tensors in
    it."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__([*devices])

    def fail(self, error: Exception, here: str) -> None:
        """Raises `error` for whoever waits. A peer that gets it as the answer to a call of its own, of the rank `here`,
        is told of it as of any that a function raised."""

        def refuse(_: Any) -> NoReturn:
            raise error

        self._set_unwrap_func(refuse)
        # not `set_exception`: torch would pass that on as a value
        told = f"{error.__cause__}\n\n" if is_told(error) else ""
        trace = told + HEAD + "".join(traceback.format_exception_only(error))
        self.set_result(RemoteException(f"On WorkerInfo(id=0, name={here}):\n{error!r}\n{trace}", type(error)))


def is_lost(error: BaseException) -> bool:
    """Whether `error` says that a peer is gone or silent, here or at a peer that was called; or the store, and with it
    rank 0's worker."""
    if isinstance(error, PeerLostError | dist.DistNetworkError):
        return True
    if isinstance(error, CallTimeoutError | RemoteError):
        return False
    return isinstance(error, RuntimeError) and bool(GONE.search(str(error)))


def failure(error: Exception, to: str, method: str, deadline: Deadline) -> Exception:
    """The PeerLostError, CallTimeoutError or RemoteError, with its cause, for what torch raised in place of the answer
    of a call."""
    failed: Exception
    text = str(error)
    if text.startswith(LATE):
        failed = CallTimeoutError(f"{to} has not answered {method} within {deadline:g} s ({deadline.setting})")
    elif remote := remote_failure(error):
        return remote
    elif GONE.search(text):
        failed = PeerLostError(f"{to} does not answer: {first_line(error)}")
    else:  # of a future that a function returned, of an operator of torch's, or of an answer that cannot be read here
        failed = RemoteError(f"{to} failed to answer {method}: {first_line(error)}")
    failed.__cause__ = error.with_traceback(None)  # which would lead to no code of the user's
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


def is_told(error: BaseException) -> bool:
    """Whether a peer said so, of itself or of another."""
    return isinstance(error.__cause__, RemoteTraceback)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type's name."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
