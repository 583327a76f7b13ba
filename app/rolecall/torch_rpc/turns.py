"""Runs incoming calls of `in_turn` functions one at a time, in the main thread."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed import rpc

from rolecall.declare.remote import IN_TURN, NOT_SERVED
from rolecall.errors import UsageError
from rolecall.torch_rpc import tracing
from rolecall.torch_rpc.rpc import is_rank0, keep_thread

Answer = torch.futures.Future[Any]
F = TypeVar("F", bound=Callable[..., Any])
Turn = tuple[Callable[..., Any], tuple[Any, ...], Answer, tracing.Carried | None]
_turns: queue.SimpleQueue[Turn] = queue.SimpleQueue()


def in_turn(function: F) -> F:
    """Makes calls of `function` run one after the other at a rank other than rank 0: in the thread of its role's
    function, once that has returned. What `function` raises is a failure of the called rank: it ends, and its caller
    sees it as lost. Without `in_turn`, calls run concurrently, and what they raise is raised at the caller.

    A call at rank 0 raises UsageError.
    """

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def queued(*args: Any) -> Answer:
        if is_rank0():  # for calls without a context
            raise UsageError(f"{function.__name__} {NOT_SERVED}")
        keep_thread()
        answer = Answer()
        _turns.put((function, args, answer, tracing.carry()))
        return answer

    IN_TURN.add(queued)
    return queued  # type: ignore[no-any-return]


def serve() -> NoReturn:
    """Runs the calls of `in_turn` functions, as they come."""
    while True:
        function, args, answer, carried = _turns.get()  # bounded by the supervisor, which ends this process
        answer.set_result(function(*args) if carried is None else carried.run(function, args))
