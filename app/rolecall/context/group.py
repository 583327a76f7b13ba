"""A rank's group: who it is, who its peers are, and calls to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.progress import Supervision
from rolecall.context.queues import Queues
from rolecall.context.transport import Transport
from rolecall.context.watchdog import Watchdog
from rolecall.declare.spec import Job
from rolecall.declare.task import Attachment, Peer
from rolecall.errors import PeerLostError, UsageError
from rolecall.wire.apart import Ordered
from rolecall.wire.session import Session, serving


class Group:
    """The members of the generation that this worker is a part of, as it sees them. `begin` makes it a part of one,
    `connect` and `open` give it what carries its calls, and `end` takes it out again; after that it may begin anew.

    Without an `attachment` it is no part of a generation yet, and whoever asks for its peers waits; only its own
    `place` is known.
    """

    def __init__(
        self,
        settings: Settings,
        attachment: Attachment | None,
        place: Peer | None = None,
        *,
        job: Job | None,
        metrics: Any,
        supervision: Supervision,
        watchdog: Watchdog,
    ) -> None:
        self.settings, self.job, self.supervision, self.watchdog = settings, job, supervision, watchdog
        self.session: Session | None = None  # the newest
        self.transport: Transport | None = None  # None while the worker cannot call its peers
        self.lost = set[str]()
        self.joins = self.losses = 0  # of peers, so far
        self.queues = Queues(metrics)  # that this member owns
        self.logger = telemetry.log()
        self.drain_ordered = threading.Event()
        self._attachment: Attachment | None = None
        self._place = place
        self._transport: Transport | None = None  # of the session, also while its workers meet
        self._waits = attachment is None  # calls wait for the transport
        self._was_open = False
        self._changed = threading.Condition(threading.RLock())  # for all of the above
        self._elastic = {role.name for role in (job.roles if job else ()) if role.elastic}
        self.on_lost: list[Callable[[str], None]] = []  # called with a peer's name; they take no time
        self.on_joined: list[Callable[[str], None]] = []
        self.listeners = Ordered()  # that the program has
        if attachment:
            self.begin(attachment)

    # ---- the generation

    def begin(self, attachment: Attachment) -> Session:
        """The worker becomes a part of a generation, whose workers are about to meet. Returns its session."""
        with self._changed:
            self._waits = self._waits or self.session is not None
            session = self.session = Session(attachment.generation, attachment.me.join)
            self._attachment, self.lost = attachment, set(attachment.lost)
            self.watchdog.forget_calls()
            self.drain_ordered.clear()
            self._changed.notify_all()
        session.on_end(self._ended)
        return session

    def connect(self, transport: Transport, session: Session) -> None:
        """The workers of `session` begin to meet, by `transport`, which is told from now on who is lost or joins."""
        with self._changed:
            if session is not self.session:
                return
            self._transport = transport
            for peer in self.members:
                transport.joined(peer)
                if peer.name in self.lost:
                    transport.lose(peer)

    def open(self, session: Session) -> None:
        """They have met: peers can be called. Raises PeerLostError if the session has ended."""
        with self._changed:
            if session is not self.session or session.ended:
                raise session.error()
            self.transport, self._was_open = self._transport, True
            self._changed.notify_all()

    def wait_open(self, seconds: float) -> Transport | None:
        """What carries calls, None after `seconds` without it. Unlike `connected`, it is for a thread that works in the
        background: the worker itself needs no generation."""
        with self._changed:
            self._changed.wait_for(lambda: self.transport is not None, seconds)
            return self.transport

    def use(self, transport: Transport | None) -> None:
        """Calls go by `transport`, without a meeting."""
        self.transport = self._transport = transport

    def _ended(self) -> None:
        with self._changed:
            self.transport = self._transport = None
            self._changed.notify_all()

    @property
    def attachment(self) -> Attachment:
        """The worker's part in the generation, or in that which has ended. Waits for the first one."""
        return self._attachment or self._first_attachment()

    def _first_attachment(self) -> Attachment:
        with self._waiting():
            self._changed.wait_for(lambda: self._attachment is not None)  # bounded by the supervisor
            assert self._attachment is not None
            return self._attachment

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The block waits for a generation, with the lock held. The supervisor is told that the worker needs one."""
        self.supervision.report_loaded()
        with self.watchdog.waiting(), self._changed:
            yield

    @property
    def newest(self) -> Attachment | None:
        """As `attachment`; None if there was none yet."""
        return self._attachment

    def has_lost_rank0(self) -> bool:
        """Whether the connection to rank 0 has broken: the generation ends, or has ended."""
        transport = self._transport
        return transport is None or transport.has_lost(self.members[0].name)

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which is a part of its generation from the start."""
        return self._attachment is not None and self._attachment.me.rank == 0

    @property
    def me(self) -> Peer:
        """This member; before its first generation, its place."""
        if self._attachment is None and self._place is not None:
            return self._place
        return self.attachment.me

    @property
    def members(self) -> tuple[Peer, ...]:
        """The members, in order of rank."""
        return self.attachment.members

    @property
    def generation(self) -> int:
        """The number of the generation."""
        return self.attachment.generation

    @property
    def connected(self) -> Transport:
        """What carries this thread's calls. Waits while the workers meet.

        Raises PeerLostError if the generation has ended, or that of the call which this thread carries out, and
        RuntimeError if nothing connects this worker.
        """
        transport = self.transport or self._opened()
        session = serving.get()
        if session is not None and session.ended:
            raise session.error()
        return transport

    def _opened(self) -> Transport:
        self.supervision.require_alive()
        if self.session is None:
            self.attachment  # noqa: B018  waits, and says so
        elif not self._waits and not self.session.ended:
            raise RuntimeError("this context is not connected to any peer")

        def settled() -> bool:
            session = serving.get()
            over = self.session is not None and self.session.ended and self._was_open
            return self.transport is not None or over or (session is not None and session.ended)

        with self._waiting():
            self._changed.wait_for(settled)  # bounded by CONNECT_TIMEOUT, and by the supervisor
            if self.transport is not None:
                return self.transport
            assert self.session is not None
            raise (serving.get() or self.session).error()

    def peers(self, role: str) -> list[Peer]:
        """The members with `role`, by ordinal, without those that were lost."""
        return [peer for peer in self.members if peer.role == role and peer.name not in self.lost]

    def is_elastic(self, role: str) -> bool:
        """Whether members of `role` may join and leave while the job trains."""
        return role in self._elastic

    # ---- peers that join or are lost

    def update(self, attachment: Attachment) -> None:
        """Who is in the generation now, as the supervisor says. The program is told of losses at once; who has joined
        is there once it has dealt with those before."""
        with self._changed:
            known = self._members_of(attachment)
        for peer in attachment.members:
            before = known.get(peer.name, peer)
            if before.join < peer.join or (before.join == peer.join and peer.name in attachment.lost):
                self.lose(before)
        with self._changed:
            if self.listeners.busy:
                self.listeners.run(self._join, attachment)
                return
        self._join(attachment)

    def _members_of(self, attachment: Attachment) -> dict[str, Peer]:
        """The members of its generation; none if the worker has left that."""
        newest = self._attachment
        is_newest = newest is not None and newest.generation == attachment.generation
        return {peer.name: peer for peer in newest.members} if newest and is_newest else {}

    def _join(self, attachment: Attachment) -> None:
        with self._changed:
            known = self._members_of(attachment)
            if not known or self._attachment is None:
                return
            joined = [
                peer for peer in attachment.members if peer.name not in known or known[peer.name].join < peer.join
            ]
            members = known | {peer.name: peer for peer in joined}
            self._attachment = replace(self._attachment, members=tuple(members.values()))
            self.lost -= {peer.name for peer in joined}
            self.joins += len(joined)
            transport = self._transport
        for peer in joined:
            if transport is not None:
                transport.joined(peer)
        for peer in attachment.members:
            if peer.name in attachment.lost:  # perhaps since it was seen to join
                self.lose(peer)
        for peer in joined:
            if peer.name not in self.lost:
                for listener in self.on_joined:
                    listener(peer.name)

    def lose(self, peer: Peer) -> bool:
        """Removes `peer` from the generation: its calls are refused, and calls to it are given up. Returns False if it
        was lost before, or has joined again."""
        if not self._remove(peer):
            return False
        if self._transport is not None:
            self._transport.lose(peer)
        return True

    def _remove(self, peer: Peer) -> bool:
        """Counts `peer` as lost, and tells those that wait for it."""
        with self._changed:
            if peer.name in self.lost or peer not in self.members:
                return False
            self.lost.add(peer.name)
            self.losses += 1
            for listener in self.on_lost:  # with the lock held: nobody sees it join again before
                listener(peer.name)
        return True

    def member(self, to: Peer | str) -> Peer:
        """The member of that name, or `to` itself. Raises UsageError for a name that no member has."""
        name = to if isinstance(to, str) else to.name
        for peer in self.members:
            if peer.name == name:
                return peer if isinstance(to, str) else to
        raise UsageError(f"no peer {name!r} in this generation ({', '.join(peer.name for peer in self.members)})")

    def give_up(self, to: Peer | str, stuck: str = "") -> None:
        """Removes a peer that was found dead, silent or `stuck`, as that text says; the gang replaces its worker."""
        peer = self.member(to)
        if self.session is None or self.session.ended:
            return  # with which all are lost
        if not (stuck and self.is_rank0):
            if self.lose(peer):
                self.supervision.report_lost(peer)
        elif self._remove(peer):
            self.connected.end_stuck(peer, stuck, otherwise=lambda: self.supervision.report_lost(peer))

    def disconnected(self, name: str, join: int, error: PeerLostError) -> None:
        """The connection to `name`, as its part number `join`, has closed. A member of an elastic role is given up; the
        supervisor of another one reports how its worker ended."""
        peer = next((peer for peer in self.members if peer.name == name), None)
        if peer is None or peer.role not in self._elastic or (name in self.lost and join <= peer.join):
            return
        # not a warning: the peer may have left in order, and rank 0's supervisor logs every loss with its cause
        self.logger.debug("peer given up", peer=name, problem=str(error))
        if join > peer.join:  # the supervisor has not said yet that it is back
            self.supervision.report_lost(replace(peer, join=join))
        else:
            self.give_up(replace(peer, join=join))

    def require_peers(self, role: str) -> None:
        """Raises PeerLostError if no peer with `role` is left, unless a drain is ordered within two leases."""
        # the gang ends such a generation, or drains it
        if not self.peers(role) and not self.drain_ordered.wait(2 * self.settings.lease_seconds):
            raise PeerLostError(f"no {role} is left")
