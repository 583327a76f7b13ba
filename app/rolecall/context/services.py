"""What each worker does for its peers, whatever its role."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from rolecall.context.group import Group
from rolecall.context.progress import Progress, ProgressEvent
from rolecall.declare.remote import remote
from rolecall.errors import PeerLostError
from rolecall.wire import clock
from rolecall.wire.connecting import Address

Search = concurrent.futures.Future[Address]
Addresses = tuple[Address, ...]  # of the members of a generation that are there


class Services:
    """The services of one worker. At rank 0, whose worker is part of one generation only, the members of the `group`
    meet; `open_store` starts the generation's torch store and returns its port."""

    def __init__(self, group: Group, progress: Progress, open_store: Callable[[], int]) -> None:
        self._group, self._progress = group, progress
        self._open_store, self._store_port = open_store, 0
        self._expected = set[str]()  # members that the others wait for
        self._addresses: dict[str, Address] = {}
        self._met: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._all_there = False
        self._searched: list[tuple[str, int, Search]] = []  # members whose address is asked for before they are there
        self._ready = set[str]()  # members that know the others' addresses
        self._all_ready = threading.Event()
        self._lock, self._store_lock = threading.Lock(), threading.Lock()

    @remote
    def end_stuck(self, problem: str) -> None:
        """This worker ends as stuck, as `problem` says."""
        self._group.supervision.report_stuck(problem)

    @remote
    def take_progress(self, event: ProgressEvent) -> None:
        """Rank 0 applies what another rank has logged."""
        self._progress.take(event)

    @remote
    def meet(self, address: Address) -> concurrent.futures.Future[Addresses]:
        """At rank 0: a member is there, at `address`. The answer comes once all are that the generation begins with."""
        self.arrived(address)
        waiting: concurrent.futures.Future[Addresses] = concurrent.futures.Future()
        self._met.add_done_callback(lambda _: waiting.set_result(self._present()))
        return waiting

    @remote
    def address(self, name: str, join: int) -> Search:
        """At rank 0: where the member `name` is, as its part number `join` or a later one. The answer comes once it is
        there. Raises PeerLostError for one that is lost."""
        search: Search = concurrent.futures.Future()
        with self._lock:
            known = self._addresses.get(name)
            if known is None or known.join < join:
                member = next((peer for peer in self._group.members if peer.name == name), None)
                if member is not None and member.join >= join and name in self._group.lost:
                    raise PeerLostError(f"{name} was lost")
                self._searched.append((name, join, search))
                return search
        search.set_result(known)
        return search

    @remote
    def ready(self, name: str) -> None:
        """At rank 0: the member `name` has the answer of `meet`."""
        with self._lock:
            self._ready.add(name)
        self._look()

    @remote
    def store_port(self) -> int:
        """At rank 0: the port of the generation's torch store, which is started with the first question."""
        with self._store_lock:
            if not self._store_port:
                self._store_port = self._open_store()
            return self._store_port

    def expect(self) -> None:
        """At rank 0: the members of the group are about to meet. One that is lost meanwhile is not waited for."""
        group = self._group
        group.on_lost.append(lambda _: self._look())
        with self._lock:
            self._expected = {peer.name for peer in group.members}

    def arrived(self, address: Address) -> None:
        """A member is there."""
        with self._lock:
            known = self._addresses.get(address.name)
            if known is not None and known.join > address.join:
                return
            self._addresses[address.name] = address
            answered = [each for each in self._searched if each[0] == address.name and each[1] <= address.join]
            self._searched = [each for each in self._searched if each not in answered]
        for _, _, search in answered:
            search.set_result(address)
        self._look()

    def _look(self) -> None:
        """Whether all have come, and know it."""
        with self._lock:
            expected = self._expected - self._group.lost
            if not expected:
                return
            all_there = not self._all_there and expected <= self._addresses.keys()
            self._all_there = self._all_there or all_there
            if expected <= self._ready:
                self._all_ready.set()
        if all_there:
            self._met.set_result(None)

    def _present(self) -> Addresses:
        with self._lock:
            return tuple(self._addresses.values())

    def wait(self, seconds: float) -> Addresses:
        """Returns once every member has said that it is ready: rank 0 may hold the interpreter's lock from then on, and
        answer nobody. Raises TimeoutError if not all are within `seconds`."""
        if not clock.wait(self._all_ready.wait, seconds):
            raise TimeoutError
        return self._present()

    def missing(self) -> list[str]:
        """The members that have not come, or do not know yet that all have."""
        with self._lock:
            return sorted(self._expected - self._group.lost - self._ready)
