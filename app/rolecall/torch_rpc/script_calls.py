"""The pending calls of a program that uses torch's RPC directly.

`rpc_sync` and `rpc_async` go through one private function of torch, which is wrapped; a call takes a microsecond more.
There is no callback: each heartbeat looks at the futures, which are referenced weakly, since an answer may be large.
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
from rolecall.record.pending_calls import PendingCall

Entry = tuple[Callable[[], Any], PendingCall]


class ScriptCalls:
    """The pending calls of `rpc_sync` and `rpc_async` to `members`, which are in order of rank."""

    def __init__(self, members: Sequence[Peer], clock: Callable[[], float] = time.monotonic) -> None:
        self._members, self._clock = members, clock
        self._entries = deque[Entry]()
        self._names: dict[str | int, str] = {}

    def watch(self) -> None:
        """Records the calls of this process from now on."""
        invoke = api._invoke_rpc
        if hasattr(invoke, "__wrapped__"):
            return

        @functools.wraps(invoke)
        def recorded(to: Any, func: Any, *rest: Any, **options: Any) -> Any:
            future = invoke(to, func, *rest, **options)
            self.add(to, func, future)
            return future

        api._invoke_rpc = recorded

    def add(self, to: Any, function: Any, future: Any) -> None:
        """Records a call of `function`, whose answer `future` gets."""
        key = to if isinstance(to, (str, int)) else to.id
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._name(key)
        call = PendingCall(name, getattr(function, "__name__", ""), self._clock(), 0.0)
        self._entries.append((weakref.ref(future), call))

    def _name(self, key: str | int) -> str:
        rank = key if isinstance(key, int) else api.get_worker_info(key).id
        return self._members[rank].name if rank < len(self._members) else ""

    def pending(self) -> list[PendingCall]:
        """The calls without an answer whose future is still referenced."""
        calls = []
        for _ in range(len(self._entries)):  # later ones are for the next heartbeat
            entry = self._entries.popleft()
            future = entry[0]()
            if future is not None and not future.done():
                self._entries.append(entry)
                calls.append(entry[1])
        return calls
