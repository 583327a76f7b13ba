"""A rank's group: who it is, who its peers are, and calls to them."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.progress import Supervision
from rolecall.context.queues import Queues
from rolecall.context.transport import Transport
from rolecall.context.watchdog import Watchdog
from rolecall.declare.spec import Job
from rolecall.declare.task import Peer
from rolecall.errors import PeerLostError, UsageError
from rolecall.wire.dispatch import Dispatcher

Answers = queue.SimpleQueue[tuple[str, Any]]


class Group:
    """The members of a generation, as the member `me` sees them. `rpc.connect` sets the `transport`."""

    def __init__(
        self,
        settings: Settings,
        me: Peer,
        members: tuple[Peer, ...],
        *,
        generation: int,
        job: Job | None,
        supervision: Supervision,
        watchdog: Watchdog,
        lost: Iterable[str],
    ) -> None:
        self.settings, self.me, self.members, self.generation, self.job = settings, me, members, generation, job
        self.lost = set(lost)
        self.mapped = set[str]()  # peers that CUDA tensors can be sent to
        self.transport: Transport | None = None
        self.dispatcher: Dispatcher | None = None
        self.queues = Queues()  # that this member owns
        self.logger = telemetry.log()
        self.supervision, self.watchdog, self.drain_ordered = supervision, watchdog, threading.Event()
        self._elastic = {role.name for role in (job.roles if job else ()) if role.elastic}
        self._listeners: list[Callable[[str], None]] = []
        self._answers: weakref.WeakSet[Answers] = weakref.WeakSet()  # of `call_each`, under way
        self._lock = threading.Lock()  # for `_answers`

    @property
    def connected(self) -> Transport:
        """The transport. Raises RuntimeError before it is there."""
        if self.transport is None:
            raise RuntimeError("this context is not connected to any peer")
        return self.transport

    def peers(self, role: str) -> list[Peer]:
        """See `Context.peers`."""
        return [peer for peer in self.members if peer.role == role and peer.name not in self.lost]

    def is_elastic(self, role: str) -> bool:
        """Whether members of `role` may join and leave while the job trains."""
        return role in self._elastic

    def collect(self) -> Answers:
        """A queue for answers; it gets (name, None) for a member that is lost meanwhile."""
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            self._answers.add(answers)
        return answers

    # ---- lost peers

    def lose(self, name: str) -> None:
        """Removes `name` from this generation: its calls are refused, and calls to it are given up."""
        if name not in self.lost:
            self._remove(name)
            if self.transport is not None:
                self.transport.lose(name)

    def _remove(self, name: str) -> None:
        """Counts `name` as lost, and tells those that wait for it."""
        self.lost.add(name)
        with self._lock:
            under_way = list(self._answers)
        for answers in under_way:
            answers.put((name, None))
        for listener in self._listeners:
            listener(name)

    def give_up(self, name: str, stuck: str = "") -> None:
        """See `Context.give_up`."""
        peer = next((peer for peer in self.members if peer.name == name), None)
        if peer is None:
            raise UsageError(f"no peer {name!r} in this generation ({', '.join(peer.name for peer in self.members)})")
        if name in self.lost:
            return
        report = functools.partial(self.supervision.report_lost, peer.role, peer.ordinal)
        if stuck and self.me.rank == 0:
            self._remove(name)
            self.connected.end_stuck(name, stuck, otherwise=report)
        else:
            self.lose(name)
            report()

    def disconnected(self, name: str, error: PeerLostError) -> None:
        """The connection to `name` has closed. A member of an elastic role is given up; the supervisor of
        another one reports how its worker ended."""
        peer = next((peer for peer in self.members if peer.name == name), None)
        if peer and peer.role in self._elastic and name not in self.lost:
            self.logger.warning("peer given up", peer=name, problem=str(error))
            self.give_up(name)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """See `Context.on_lost`."""
        self._listeners.append(listener)

    def require_peers(self, role: str) -> None:
        """See `Context.require_peers`."""
        # the gang ends such a generation, or drains it
        if not self.peers(role) and not self.drain_ordered.wait(2 * self.settings.lease_seconds):
            raise PeerLostError(f"no {role} is left")
