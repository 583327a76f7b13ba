"""A rank's group: who it is, who its peers are, and calls to them."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.progress import Supervision
from rolecall.context.transport import Transport
from rolecall.context.watchdog import Watchdog
from rolecall.declare.remote import NOT_SERVED, is_in_turn, require_unbound
from rolecall.declare.spec import Job
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.record.recorder import recorder
from rolecall.wire.dispatch import Dispatcher

Lost = Literal["skip", "raise", "answer"]
EXAMINE_SECONDS = 2.0  # that a call may take past its deadline, to ask the peer what it does
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
        self.functions: Any = None  # the TorchRpc
        self.dispatcher: Dispatcher | None = None
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

    # ---- calls

    def call(self, to: Peer | str, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Any:
        """See `Context.call`."""
        name = to if isinstance(to, str) else to.name
        require_unbound(function)
        if is_in_turn(function) and name == self.members[0].name:
            raise UsageError(f"{function.__name__} {NOT_SERVED}")
        limit = self.watchdog.limit(name, timeout, self.settings.rpc_timeout)
        return self.functions.call(name, function, *args, timeout=limit)

    def call_each(
        self, role: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0, lost: Lost | None = None
    ) -> Iterator[tuple[Peer, Any]]:
        """See `Context.call_each`."""
        if self.job and role not in {each.name for each in self.job.roles}:
            raise UsageError(self.job.no_role(role))
        self.require_peers(role)
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            self._answers.add(answers)
        called = {peer.name: peer for peer in self.peers(role)}
        limits = [self.watchdog.limit(name, timeout, self.settings.rpc_timeout) for name in called]
        for name in called:
            future = self.call(name, function, *args, timeout=timeout)
            future.add_done_callback(lambda answered, name=name: answers.put((name, answered)))
        # longer than the calls' own deadlines, which end each of them
        seconds = max(limits, default=0.0) + EXAMINE_SECONDS + self.settings.rpc_timeout if timeout else None
        return self._collect(role, called, answers, seconds, lost or ("skip" if role in self._elastic else "raise"))

    def _collect(
        self, role: str, called: dict[str, Peer], answers: Answers, seconds: float | None, lost: Lost
    ) -> Iterator[tuple[Peer, Any]]:
        any_answered = False
        while called:
            with recorder.span("wait"):
                name, answered = answers.get(timeout=seconds)
            peer = called.pop(name, None)
            if peer is None:
                continue  # lost before its answer came
            try:
                value = self._outcome(name, answered)
            except (PeerLostError, CallTimeoutError) as error:
                if lost == "raise":
                    raise
                self.give_up(name, stuck=str(error) if isinstance(error, CallTimeoutError) else "")
                if lost == "skip":
                    continue
                value = error
                if isinstance(error, CallTimeoutError):
                    value = PeerLostError(f"{name} was given up: {error}")
                    value.__cause__ = error
            any_answered = True
            yield peer, value
        if not any_answered:
            self.require_peers(role)  # all were lost meanwhile

    def _outcome(self, name: str, answered: Any) -> Any:
        """The answer of a call to `name`. Raises what the call failed with."""
        if answered is None or name in self.lost:
            raise PeerLostError(f"{name} was lost")
        try:
            return answered.value()
        except (PeerLostError, CallTimeoutError) as error:
            self.logger.warning("peer given up", peer=name, problem=str(error))
            raise

    # ---- lost peers

    def lose(self, name: str) -> None:
        """Removes `name` from this generation: its calls are refused, and calls to it are given up."""
        if name in self.lost:
            return
        self.lost.add(name)
        with self._lock:
            under_way = list(self._answers)
        for answers in under_way:
            answers.put((name, None))
        for listener in self._listeners:
            listener(name)
        if self.transport is not None:
            self.transport.lose(name)

    def give_up(self, name: str, stuck: str = "") -> None:
        """See `Context.give_up`."""
        peer = next((peer for peer in self.members if peer.name == name), None)
        if peer is None:
            raise UsageError(f"no peer {name!r} in this generation ({', '.join(peer.name for peer in self.members)})")
        if name in self.lost:
            return
        self.lose(name)
        report = functools.partial(self.supervision.report_lost, peer.role, peer.ordinal)
        if stuck and self.me.rank == 0:
            self.connected.end_stuck(name, stuck, otherwise=report)
        else:
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
