"""Which functions peers can call: checked before a job starts, at the caller, and at the peer."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from rolecall.errors import UsageError

NOT_IMPORTABLE = "cannot be called at a peer: define it with `def` at the top of a module"
METHOD = (
    "is a method of an object, and a peer would call it on a copy: call a function at the top of a module, which gets "
    "the peer's own object from a RankObject"
)
NOT_SERVED = (
    "is @in_turn, which rank 0 never serves: the job is over once its function has returned; leave @in_turn out, or "
    "call it at another rank"
)
IN_TURN = set[FunctionType]()  # what `in_turn` has made


def require_unbound(function: Callable[..., Any]) -> None:
    """Raises UsageError for a method of an object, bound to it: a call would act on a copy of the object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, MethodType | BuiltinMethodType | MethodWrapperType):
        return
    if function.__self__ is not None and not isinstance(function.__self__, type | ModuleType):
        raise UsageError(f"{function.__qualname__} {METHOD}")


def is_in_turn(function: Callable[..., Any]) -> bool:
    """Whether `in_turn` has made it."""
    return isinstance(function, FunctionType) and function in IN_TURN


def require_importable(function: Callable[..., Any]) -> None:
    """Raises UsageError if a peer could not import `function` by its module and name, or would call it on a copy."""
    require_unbound(function)
    try:
        pickle.dumps(function)
    except Exception as error:  # of several kinds
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(f"{name} {NOT_IMPORTABLE}") from error
