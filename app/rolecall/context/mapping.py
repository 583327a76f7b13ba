"""A map over the members of a role: `links.Pool` decides, and this calls, waits and reads the items."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from rolecall.context.group import Group
from rolecall.context.shared import JoinedAgainError, Sharing
from rolecall.context.transport import Transport
from rolecall.declare.task import Peer
from rolecall.errors import CallError, CallTimeoutError, PeerLostError
from rolecall.links.pool import Answered, Pool
from rolecall.record.recorder import recorder
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline
from rolecall.wire.session import Session

LOOK_SECONDS = 0.5  # between two looks whether the generation ends, while no member is there


class Event(NamedTuple):
    """What the thread that reads the answers is told: that the call of the item `number` has ended, with `future`; that
    a `peer` has the shared arguments, or will not get them, because of an `error`; or, without all these, that a member
    has joined."""

    number: int = -1
    future: Any = None
    peer: Peer | None = None
    error: BaseException | None = None


class Mapping:
    """One map: `pool` is asked what to do next, `call(peer, args, kwargs)` calls the method, and `members()` are those
    of the `role` that may be called. With `waits`, others may join. Everything happens in the thread that reads
    `answers`."""

    def __init__(
        self,
        group: Group,
        pool: Pool,
        items: Iterable[Any],
        sharing: Sharing,
        *,
        role: str,
        members: Callable[[], list[Peer]],
        call: Callable[[Peer, tuple[Any, ...], dict[str, Any]], Future[Any]],
        waits: bool,
    ) -> None:
        self._group, self._pool, self._sharing, self._call = group, pool, sharing, call
        self._items, self._role, self._members, self._waits = items, role, members, waits
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._calls: dict[int, tuple[Peer, Future[Any]]] = {}  # under way, by the item's number

    def answers(self) -> Generator[Answered, None, None]:
        """Each item and its answer. Calls go out, and items are read, while the next one is asked for."""
        group, events = self._group, self._events

        def joined(_: str) -> None:
            events.put(Event())

        group.on_joined.append(joined)
        try:
            yield from self._answers()
        except Exception:  # not at the generator's end, which a collection may bring
            self.close()
            raise
        finally:
            group.on_joined.remove(joined)
        self.close()

    def _answers(self) -> Iterator[Answered]:
        pool, transport, items = self._pool, self._group.connected, iter(self._items)
        session = self._group.session
        assert session is not None
        while True:
            for peer in pool.see(self._members()):
                self._prepare(peer, transport)
            self._call_members()
            if answered := pool.take():
                yield answered  # before an item is read, which may depend on it
                self._take_all(session)
                self._read(items)
                continue
            self._read(items)
            if pool.over:
                return
            if pool.nobody:
                event = self._wait_for_members(session)
            else:
                with recorder.span("wait"):
                    event = self._events.get()  # each call ends at its own deadline
            self._take(event, session)
            self._take_all(session)

    def _call_members(self) -> None:
        """Calls members as long as one has room, and an item waits."""
        pool, events = self._pool, self._events
        while (task := pool.next_call()) is not None:
            peer, number = task.member, task.number
            args, kwargs = self._sharing.of(peer.name)
            future = self._call(peer, (task.item, *args), kwargs)
            self._calls[number] = peer, future
            future.then(partial(_tell, events, number))

    def _read(self, items: Iterator[Any]) -> None:
        """Reads items, and calls members with them, as long as one has room."""
        pool = self._pool
        while pool.wants:
            for item in items:
                pool.read(item)
                self._call_members()
                break
            else:
                pool.exhausted()

    def _prepare(self, peer: Peer, transport: Transport) -> None:
        limit = self._group.settings.phase_timeout
        deadline = Deadline(limit, f"PHASE_TIMEOUT={limit:g}")
        events = self._events
        self._sharing.send(peer.name, transport, deadline, lambda error: events.put(Event(peer=peer, error=error)))

    def _wait_for_members(self, session: Session) -> Event:
        """Waits until a member joins."""
        group, role = self._group, self._role
        limit = group.settings.rejoin_timeout
        ends = time.monotonic() + limit
        with group.watchdog.waiting(), recorder.span("wait"):
            while not session.ended:
                if not self._waits:
                    raise PeerLostError(f"no {role} of those in `to` is left")
                if group.drain_ordered.is_set():
                    raise PeerLostError(f"no {role} is left, and the job drains")
                if time.monotonic() > ends:
                    raise PeerLostError(f"no {role} has joined within {limit:g} s (REJOIN_TIMEOUT)")
                with contextlib.suppress(queue.Empty):
                    return self._events.get(timeout=LOOK_SECONDS)
        raise session.error()

    def _take_all(self, session: Session) -> None:
        """Takes what has happened by now."""
        while not self._events.empty():  # which nobody else reads
            self._take(self._events.get_nowait(), session)

    def _take(self, event: Event, session: Session) -> None:
        """Something has happened."""
        peer, future, error = event.peer, event.future, event.error
        if future is not None:
            peer, _ = self._calls.pop(event.number)
            error = future.exception()
            if error is None:
                self._pool.answered(event.number, future.result())
        elif peer is not None and error is None:
            self._pool.prepared(peer)
        if error is None or peer is None:
            return
        if isinstance(error.__cause__, JoinedAgainError):
            error = error.__cause__
        is_lost = isinstance(error, PeerLostError | CallTimeoutError) and not error.is_remote
        if not is_lost or session.ended or not self._group.is_elastic(self._role):
            raise error
        if future is None:
            self._pool.forget(peer)
        else:
            self._pool.lost(event.number, cast(CallError, error))
        stuck = str(error) if isinstance(error, CallTimeoutError) else ""
        if stuck:
            self._group.logger.warning("peer given up", peer=peer.name, problem=stuck)
        self._group.give_up(peer, stuck)

    def close(self) -> None:
        """Cancels the calls that are still out. Members forget what they share."""
        for _, future in self._calls.values():
            future.cancel()
        self._sharing.close()

    def drop(self) -> None:
        """As `close`, soon; see `Future.drop`."""
        for _, future in [*self._calls.values()]:
            future.drop()
        self._sharing.drop()


def _tell(events: queue.SimpleQueue[Event], number: int, future: concurrent.futures.Future[Any]) -> None:
    events.put(Event(number, future))
