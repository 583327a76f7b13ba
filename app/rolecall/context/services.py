"""What each worker does for its peers, whatever its role."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rolecall.context.progress import Progress, ProgressEvent, Supervision
from rolecall.context.queues import Queues
from rolecall.declare.remote import remote
from rolecall.wire.connecting import Address
from rolecall.wire.late import stacks_of


class Met(NamedTuple):
    """What the members of a generation learn when all have come: their addresses, and the port of the torch store, 0 if
    it is not started yet."""

    addresses: tuple[Address, ...]
    store_port: int


class Services:
    """The services of one worker. `members` are the names of those that meet; at rank 0, `open_store` starts the
    generation's torch store and returns its port."""

    def __init__(
        self, members: frozenset[str], supervision: Supervision, progress: Progress, open_store: Callable[[], int]
    ) -> None:
        self._members, self._supervision, self._progress = members, supervision, progress
        self.queues = Queues()
        self._open_store, self._store_port = open_store, 0
        self._addresses: dict[str, Address] = {}
        self._met: concurrent.futures.Future[Met] = concurrent.futures.Future()
        self._ready = set[str]()  # members that know the others' addresses
        self._all_ready = threading.Event()
        self._lock, self._store_lock = threading.Lock(), threading.Lock()

    @remote
    async def queue_put(self, name: str, maxsize: int, item: Any, seconds: float | None) -> bool:
        """See `Queues.put`."""
        return await self.queues.put(name, maxsize, item, seconds)

    @remote
    async def queue_get(self, name: str, maxsize: int, seconds: float | None) -> tuple[Any, ...]:
        """See `Queues.get`."""
        return await self.queues.get(name, maxsize, seconds)

    @remote
    def stacks(self, method: str) -> str:
        """The stacks of the threads that run `method`."""
        return stacks_of(method)

    @remote
    def end_stuck(self, problem: str) -> None:
        """This worker ends as stuck, as `problem` says."""
        self._supervision.report_stuck(problem)

    @remote
    def take_progress(self, event: ProgressEvent) -> None:
        """Rank 0 applies what another rank has logged."""
        self._progress.take(event)

    @remote
    def meet(self, address: tuple[Any, ...]) -> concurrent.futures.Future[Met]:
        """At rank 0: a member is there, at `address`. The answer comes once all are."""
        self.arrived(Address(*address))
        waiting: concurrent.futures.Future[Met] = concurrent.futures.Future()
        self._met.add_done_callback(lambda met: waiting.set_result(met.result()))
        return waiting

    @remote
    def ready(self, name: str) -> None:
        """At rank 0: the member `name` has the answer of `meet`."""
        with self._lock:
            self._ready.add(name)
            if self._members <= self._ready:
                self._all_ready.set()

    @remote
    def store_port(self) -> int:
        """At rank 0: the port of the generation's torch store, which is started with the first question."""
        with self._store_lock:
            if not self._store_port:
                self._store_port = self._open_store()
            return self._store_port

    def arrived(self, address: Address) -> None:
        """A member is there."""
        with self._lock:
            self._addresses[address.name] = address
            all_there = self._members <= self._addresses.keys() and not self._met.done()
            if all_there:
                self._met.set_running_or_notify_cancel()
                self._met.set_result(Met(tuple(self._addresses.values()), self._store_port))

    def wait(self, seconds: float) -> Met:
        """Returns once every member has said that it is ready: rank 0 may hold the interpreter's lock from then on, and
        answer nobody. Raises TimeoutError if not all are within `seconds`."""
        if not self._all_ready.wait(seconds):
            raise TimeoutError
        return self._met.result()

    def missing(self) -> list[str]:
        """The members that have not come, or do not know yet that all have."""
        with self._lock:
            return sorted(self._members - self._ready)
