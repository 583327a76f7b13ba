"""Bounded queues between ranks: whoever puts into a full one waits, at whatever rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rolecall.declare.remote import remote
from rolecall.errors import UsageError
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Handover, Request

T = TypeVar("T")
Pending = concurrent.futures.Future[Any]


class Items:
    """What is in the queue `name` at its owner, whose worker has `metrics`. Safe to use from several threads."""

    def __init__(self, name: str, maxsize: int, metrics: Any) -> None:
        self.maxsize, waited = maxsize, metrics.queue_wait_seconds
        self._depth, self._count = metrics.queue_depth.labels(name), metrics.queue_items.labels(name)
        self._put_seconds, self._get_seconds = waited.labels(name, "put"), waited.labels(name, "get")
        metrics.queue_size.labels(name).set(maxsize)
        self._depth.set(0)  # the owner's worker before this one may have left another value
        self._items = deque[Any]()
        # those that wait, the oldest first: what is given up is forgotten at once
        self._getters, self._putters = OrderedDict[Pending, None](), OrderedDict[Pending, Any]()
        self._lock = threading.Lock()

    def put(self, item: Any) -> Pending:
        """A future that ends once `item` is in the queue, and that can be cancelled before."""
        answer: Pending = concurrent.futures.Future()
        with self._lock:
            self._putters[answer] = item
            ended = self._move()
        _end(ended)
        self._watch(answer, self._putters, self._put_seconds)
        return answer

    def get(self) -> Pending:
        """A future of the next item, which can be cancelled."""
        answer: Pending = concurrent.futures.Future()
        with self._lock:
            self._getters[answer] = None
            ended = self._move()
        _end(ended)
        self._watch(answer, self._getters, self._get_seconds)
        return answer

    def _watch(self, answer: Pending, waiting: OrderedDict[Pending, Any], seconds: Any) -> None:
        """Until `answer` ends, if it has to wait: its time is added to the counter `seconds`, and it is no longer
        `waiting` if it is cancelled."""
        if answer.done():
            return
        began = time.monotonic()

        def ended(answer: Pending) -> None:
            seconds.inc(time.monotonic() - began)
            if answer.cancelled():
                with self._lock:
                    waiting.pop(answer, None)

        answer.add_done_callback(ended)

    def put_back(self, item: Any) -> None:
        """Takes back an item whose getter has gone."""
        with self._lock:
            self._items.appendleft(item)
            ended = self._move()
        _end(ended)

    def _move(self) -> list[tuple[Pending, Any]]:
        """Moves items as far as they go. Returns the futures that end, with their results."""
        ended: list[tuple[Pending, Any]] = []
        while True:
            if self._putters and len(self._items) < self.maxsize:
                putter, item = self._putters.popitem(last=False)
                if putter.set_running_or_notify_cancel():
                    self._items.append(item)
                    self._count.inc()
                    ended.append((putter, None))
            elif self._getters and self._items:
                getter, _ = self._getters.popitem(last=False)
                if getter.set_running_or_notify_cancel():
                    ended.append((getter, self._items.popleft()))
            else:
                self._depth.set(len(self._items))
                return ended

    def snapshot(self) -> list[Any]:
        """The items, the next one first, and those that wait for room."""
        with self._lock:
            return [*self._items, *(item for putter, item in self._putters.items() if not putter.cancelled())]

    def __len__(self) -> int:
        return len(self._items)


def _end(ended: list[tuple[Pending, Any]]) -> None:
    for future, result in ended:  # without the lock: callbacks may use the queue
        future.set_result(result)


class Queues:
    """The queues that this worker owns, by name, as its peers call them. `metrics` are the worker's."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._queues: dict[str, Items] = {}
        self._lock = threading.Lock()

    def open(self, name: str, maxsize: int) -> Items:
        """The queue `name`, made at its first use. Raises UsageError if it has another size."""
        if maxsize < 1:
            raise UsageError(f"queue {name!r}: maxsize={maxsize} must be at least 1")
        with self._lock:
            items = self._queues.get(name)
            if items is None:
                items = self._queues[name] = Items(name, maxsize, self._metrics)
        if items.maxsize != maxsize:
            raise UsageError(f"queue {name!r}: has maxsize={items.maxsize}, and {maxsize} at another place")
        return items

    @remote
    async def queue_put(self, name: str, maxsize: int, item: Any, seconds: float | None) -> bool:
        """Puts `item`. Returns whether there was room within `seconds`."""
        answer = self.open(name, maxsize).put(item)
        await _wait(answer, seconds)
        return not answer.cancelled()

    @remote
    async def queue_get(self, name: str, maxsize: int, seconds: float | None) -> Handover[tuple[Any, ...]] | tuple[()]:
        """The next item as a tuple, which is empty if there was none within `seconds`. An item that does not reach its
        getter is in the queue again, as the next one."""
        items = self.open(name, maxsize)
        answer = items.get()
        try:
            await _wait(answer, seconds)
        except asyncio.CancelledError:  # the getter has gone
            if not answer.cancelled():
                items.put_back(answer.result())
            raise
        return () if answer.cancelled() else Handover((item := answer.result(),), lambda: items.put_back(item))


async def _wait(answer: Pending, seconds: float | None) -> None:
    """Waits for `answer`, and cancels it after `seconds` or if the waiter is cancelled: it has ended then."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wrap_future(answer)
    except TimeoutError:
        pass
    finally:
        answer.cancel()


class Queue(Generic[T]):
    """A queue of at most `maxsize` items, which is at one member and used from all; `Context.queue` makes it.

    An item goes to one getter, and is lost with a member that has taken it. If the connection breaks as an item
    arrives, it may be delivered twice. The owner may save the queue: it is a value
    for `Context.restore`, with the items in it and those that wait for room.
    """

    def __init__(
        self,
        name: str,
        maxsize: int,
        items: Items | None,
        call: Callable[[Request, Deadline], Future[Any]],
        rpc_timeout: float,
    ) -> None:
        self.name, self.maxsize = name, maxsize
        self._items, self._call, self._rpc_timeout = items, call, rpc_timeout

    def put(self, item: T, timeout: float | None = None) -> None:
        """Puts `item`; waits for room. Raises queue.Full after `timeout` seconds, PeerLostError if the owner is
        gone, CallTimeoutError if it is alive and says nothing for RPC_TIMEOUT beyond that."""
        if self._items is not None:
            answer = self._items.put(item)
            if not _ended(answer, timeout):
                raise queue.Full
            return
        if not self._ask("queue_put", timeout, item).result():
            raise queue.Full

    def get(self, timeout: float | None = None) -> T:
        """The next item; waits for one. Raises queue.Empty after `timeout` seconds, PeerLostError if the owner is
        gone."""
        if self._items is not None:
            answer = self._items.get()
            if not _ended(answer, timeout):
                raise queue.Empty
            item: T = answer.result()
            return item
        for item in self._ask("queue_get", timeout).result():
            return item
        raise queue.Empty

    def put_async(self, item: T) -> concurrent.futures.Future[Any]:
        """As `put`, without the wait: a future that ends once `item` is in the queue."""
        return self._ask("queue_put", None, item) if self._items is None else self._items.put(item)

    def __len__(self) -> int:
        if self._items is None:
            raise UsageError(f"queue {self.name!r}: only its owner knows its length")
        return len(self._items)

    def state_dict(self) -> dict[str, Any]:
        """The items. Only at the owner."""
        if self._items is None:
            raise UsageError(f"queue {self.name!r}: only its owner can save it")
        return {"items": self._items.snapshot()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the saved items, of which those that exceed the size wait for room."""
        assert self._items is not None
        for item in state["items"]:
            self._items.put(item)

    def _ask(self, method: str, timeout: float | None, *args: Any) -> Future[Any]:
        # without a timeout, the wait ends with the owner's worker
        seconds = 0.0 if timeout is None else timeout + self._rpc_timeout
        deadline = Deadline(seconds, f"timeout={timeout} and RPC_TIMEOUT={self._rpc_timeout:g}")
        return self._call(Request(method, (self.name, self.maxsize, *args, timeout), {}, 0.0, internal=True), deadline)


def _ended(answer: Pending, timeout: float | None) -> bool:
    """Waits for `answer`. Returns False if it was given up after `timeout` seconds."""
    try:
        answer.result(timeout)
    except TimeoutError:
        return not answer.cancel()  # it may have ended just now
    return True
