"""Which methods of a role's class peers may call: `remote` marks them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from rolecall.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__rolecall_remote__"  # attribute of a function that `remote` has marked


@dataclass(frozen=True)
class Remote:
    """How a method is called; see `remote`."""

    turn: bool = False
    serial: bool = False
    stream: bool = False
    idempotent: bool = False
    coroutine: bool = False
    grad: bool = False


@overload
def remote(method: F) -> F: ...
@overload
def remote(
    *, turn: bool = False, serial: bool = False, stream: bool = False, idempotent: bool = False, grad: bool = False
) -> Callable[[F], F]: ...
def remote(
    method: F | None = None,
    *,
    turn: bool = False,
    serial: bool = False,
    stream: bool = False,
    idempotent: bool = False,
    grad: bool = False,
) -> F | Callable[[F], F]:
    """Lets peers call a method of a role's class. Calls run concurrently, each in a thread of its own; an `async`
    method runs in an event loop; a method may also return a concurrent.futures.Future, whose result is the answer.

    With `serial`, one call at a time runs of all methods of the object that have it, in the order in which they came,
    beside `run` and other methods; an `async` one, or one that returns a future, until that has ended. With `turn`,
    calls run one after the other in the member's main thread, once `run` has returned, if there is one; not at rank 0.
    With `stream`, the method is a generator, and the caller iterates over what it yields. With `idempotent`, `call_any`
    and `map` call it again at another member if the first is lost. With `grad`, the tensors that it returns are
    differentiable at the caller, in tensors among the arguments and in parameters here: see `Context.gradients`.

    Raises UsageError for a stream that is no generator, and for what excludes each other.
    """

    def set_mark(function: F) -> F:
        if not inspect.isfunction(function):
            raise UsageError(f"@remote: {function!r} is no function; put it above the method's `def`, below no other")
        if stream != inspect.isgeneratorfunction(function):
            advice = "yield in it" if stream else "say @remote(stream=True)"
            raise UsageError(f"@remote: {function.__qualname__} is {'no' if stream else 'a'} generator; {advice}")
        coroutine = inspect.iscoroutinefunction(function)
        if turn and (stream or coroutine):
            raise UsageError(f"@remote(turn=True): {function.__qualname__} is async or a stream; leave turn out")
        if serial and (turn or stream):
            raise UsageError(
                f"@remote(serial=True): {function.__qualname__} has turn=True or is a stream; leave one out"
            )
        if grad and (stream or coroutine or idempotent):
            raise UsageError(
                f"@remote(grad=True): {function.__qualname__} is async, a stream or idempotent; leave that out"
            )
        mark = Remote(turn=turn, serial=serial, stream=stream, idempotent=idempotent, coroutine=coroutine, grad=grad)
        setattr(function, MARK, mark)
        return function

    return set_mark if method is None else set_mark(method)


def remote_of(method: Any) -> Remote | None:
    """How a method is called; None for one that `remote` has not marked."""
    mark = getattr(method, MARK, None)
    return mark if isinstance(mark, Remote) else None


def require_remote(method: Any) -> Remote:
    """How a method is called. Raises UsageError for what is no method marked by `remote`."""
    name = getattr(method, "__qualname__", repr(method))
    mark = remote_of(method)
    if mark is None:
        raise UsageError(f"{name} cannot be called at a peer: put @remote above its `def` in the class of a role")
    if inspect.ismethod(method):
        raise UsageError(f"{name} is a method of an object here: name it by its class, such as {name}")
    return mark


def find(target: object, name: str) -> Callable[..., Any] | None:
    """The bound method `name` of `target`, if its class marks it as remote. Attributes of the instance do not count."""
    return getattr(target, name) if _has_remote(type(target), name) else None  # type: ignore[arg-type]


def serial_names(target: object) -> frozenset[str]:
    """The methods of `target` of which one runs at a time."""
    kind = type(target)
    marks = {name: remote_of(inspect.getattr_static(kind, name, None)) for name in dir(kind)}
    return frozenset(name for name, mark in marks.items() if mark and mark.serial)


@functools.lru_cache(maxsize=1024)
def _has_remote(kind: type, name: str) -> bool:
    function = inspect.getattr_static(kind, name, None)
    return inspect.isfunction(function) and remote_of(function) is not None
