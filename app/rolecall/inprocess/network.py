"""Connects the workers of a generation within one process: a link is a pair of sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rolecall.context import meeting
from rolecall.context.context import Context
from rolecall.errors import PeerLostError
from rolecall.inprocess.threads import Threads, acting_for, owner
from rolecall.wire.calls import Wire
from rolecall.wire.connecting import Address
from rolecall.wire.link import Sockets, pair
from rolecall.wire.session import Session

LOOK_SECONDS = 0.5  # between two looks whether the session has ended


class Reached(NamedTuple):
    """A worker that takes connections, as its part number `join` of a generation."""

    wire: Wire
    join: int
    threads: Threads | None


class Network:
    """The workers of one run that take connections, by generation and name."""

    def __init__(self) -> None:
        self._reached: dict[tuple[int, str], Reached] = {}
        self._changed = threading.Condition()

    def meet(self, context: Context[Any], session: Session) -> None:
        """Has the worker of `context` meet the others of its generation. Raises PeerLostError."""
        me = context.me.name

        def accept(wire: Wire) -> Address:
            place, reached = (session.generation, me), Reached(wire, session.join, owner())
            with self._changed:
                self._reached[place] = reached
                self._changed.notify_all()
            session.on_end(lambda: self._forget(place, reached))
            return Address(me, "", 0, join=session.join)

        meeting.meet_by(Dialer(self, me, session), accept, context, session)

    def _forget(self, place: tuple[int, str], reached: Reached) -> None:
        with self._changed:
            if self._reached.get(place) is reached:
                del self._reached[place]
            self._changed.notify_all()

    def find(self, session: Session, peer: str, join: int) -> Reached:
        """Waits until `peer` takes connections, as its part number `join` or a later one. Raises PeerLostError if
        `session` ends before."""
        place = session.generation, peer
        with self._changed:
            while (reached := self._reached.get(place)) is None or reached.join < join:
                if session.ended:
                    raise session.error()
                self._changed.wait(LOOK_SECONDS)
            return reached


class Dialer:
    """Connects the worker `me` to peers in `session`."""

    def __init__(self, network: Network, me: str, session: Session) -> None:
        self._network, self._me, self._session = network, me, session
        self.addresses: dict[str, Address] = {}
        self.find: Callable[[str, int], Address] = self._no_address

    @staticmethod
    def _no_address(peer: str, join: int) -> Address:
        raise PeerLostError(f"{peer} has no address: it is in this process")

    def open(self, peer: str, join: int) -> Sockets:
        """Connects to `peer`, which is there as its part number `join` of the generation, or a later one."""
        reached = self._network.find(self._session, peer, join)
        ours, theirs = pair()
        with acting_for(reached.threads):  # what reads there is a thread of the peer
            reached.wire.accept(self._me, theirs._replace(join=self._session.join))
        return ours._replace(join=reached.join)
