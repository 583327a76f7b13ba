"""The remote calls of a program that knows nothing of Rolecall, for whoever looks what its threads wait for.

Its `rpc_sync` and `rpc_async` go through one function of torch's, a private one. A call costs a microsecond more:
nothing is called back. The futures are looked at with each heartbeat, and held weakly, since an answer may be large.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.rpc import api

from rolecall.declare.task import Peer
from rolecall.record.waits import Call

Entry = tuple[Callable[[], Any], Call]


class ScriptCalls:
    """The calls of torch's `rpc_sync` and `rpc_async` that are under way to `members`, which are in order of rank."""

    def __init__(self, members: Sequence[Peer], clock: Callable[[], float] = time.monotonic) -> None:
        self._members, self._clock = members, clock
        self._entries = deque[Entry]()
        self._names: dict[str | int, str] = {}

    def watch(self) -> None:
        """Notes the calls of this process from now on."""
        invoke = api._invoke_rpc
        if hasattr(invoke, "__wrapped__"):
            return

        @functools.wraps(invoke)
        def noted(to: Any, func: Any, *rest: Any, **options: Any) -> Any:
            future = invoke(to, func, *rest, **options)
            self.add(to, func, future)
            return future

        api._invoke_rpc = noted

    def add(self, to: Any, function: Any, future: Any) -> None:
        """Notes a call of `function`, whose answer `future` gets."""
        key = to if isinstance(to, (str, int)) else to.id
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._name(key)
        call = Call(name, getattr(function, "__name__", ""), self._clock(), 0.0)
        self._entries.append((weakref.ref(future), call))

    def _name(self, key: str | int) -> str:
        rank = key if isinstance(key, int) else api.get_worker_info(key).id
        return self._members[rank].name if rank < len(self._members) else ""

    def under_way(self) -> list[Call]:
        """The calls that have no answer yet, and whose answer somebody wants."""
        calls = []
        for _ in range(len(self._entries)):  # those that come meanwhile are for the next time
            entry = self._entries.popleft()
            future = entry[0]()
            if future is not None and not future.done():
                self._entries.append(entry)
                calls.append(entry[1])
        return calls
