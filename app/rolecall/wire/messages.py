"""What frames carry: requests, and what a method raised. They travel as plain tuples, which decode to these."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rolecall.errors import CallError, CallTimeoutError, PeerLostError, RemoteError, RemoteTraceback, UsageError
from rolecall.links.calls import Deadline as Deadline

T = TypeVar("T")
MAX_RUNNING = 64  # calls that a worker carries out at a time; further ones wait
EXAMINE_SECONDS = 2.0  # that a call may take past its deadline, to ask the peer what it does
MAX_ERROR_BYTES = 64 * 1024  # of a pickled exception
Carrier = dict[str, str]  # a context, written by OpenTelemetry's propagators
KINDS: dict[str, type[CallError]] = {kind.__name__: kind for kind in (PeerLostError, CallTimeoutError, RemoteError)}


class TraceHeader(NamedTuple):
    """The caller's span, for the callee's: empty texts while the caller records nothing."""

    span: str = ""
    trace: str = ""
    caller: str = ""
    carrier: Carrier | None = None


class Request(NamedTuple):
    """A call of `method` of the callee's role; of its worker's own services, if it is `internal`. It does not begin
    later than after `seconds`, unless they are 0."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seconds: float
    internal: bool = False
    trace: tuple[str, str, str, Carrier | None] | None = None


class PassKey(NamedTuple):
    """A block `with context.gradients()`, the `number`th of a member as its part number `join` of the generation."""

    member: str
    join: int
    number: int


class Forward(NamedTuple):
    """The only argument of a call of a method with `grad`: those of the method, and what the callee keeps for the
    backward pass. Without a `key` that is nothing.

    `place` names the call: its caller, the number of the caller's part, and the call's number. Of the tensors among
    `args` and `kwargs`, those whose numbers are in `wanted` need a gradient; its values say which are on a GPU there.
    Forward passes that are `released` are not kept any more.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: PassKey | None = None
    place: PassKey = PassKey("", 0, 0)
    wanted: dict[int, bool] = {}  # noqa: RUF012 nobody changes it
    released: tuple[tuple[PassKey, PassKey], ...] = ()


@dataclass(frozen=True)
class Handover(Generic[T]):
    """The answer of an async method whose receipt the caller confirms. If it never does, `undo` is called, from any
    thread."""

    value: T
    undo: Callable[[], None]


class Failure(NamedTuple):
    """What a call ended with at the callee: the error's kind, if it is one of KINDS, its text in a line, its traceback,
    and itself, if it can be pickled."""

    kind: str
    text: str
    traceback: str = ""
    pickled: bytes = b""

    def error(self) -> CallError | UsageError:
        """The error to raise at the caller, with its cause."""
        if self.kind == UsageError.__name__:
            return UsageError(self.text)
        error = KINDS.get(self.kind, RemoteError)(self.text)
        error.__cause__, error.is_remote = RemoteTraceback(self.traceback), True
        if self.pickled:
            try:
                raised = pickle.loads(self.pickled)
            except BaseException:  # a class that is unknown here, or has a constructor of its own
                return error
            if isinstance(raised, Exception):
                raised.__cause__, error.__cause__ = error.__cause__, raised
        return error


def pickled(error: BaseException) -> bytes:
    """An exception without its traceback; nothing if it cannot be pickled."""
    try:
        body = pickle.dumps(error)
    except BaseException:  # of any kind
        return b""
    return body if len(body) <= MAX_ERROR_BYTES else b""
