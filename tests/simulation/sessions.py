"""A worker's part in a generation as its peers see it, around the links and calls under test, as wire/ and the meeting
of context/ are: connections, requests and answers take time, and are cut, lost and refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolecall.declare.task import Attachment
from rolecall.errors import PeerLostError
from rolecall.life.parts import PartId
from rolecall.links import effects
from rolecall.links.calls import Call, Deadline, Examined
from rolecall.links.links import Links
from tests.simulation.pipes import Pipe
from tests.simulation.rules import CONNECT_TIMEOUT, EXAMINE, LEASE

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

Then = Callable[[Exception | None], None]


@dataclass(frozen=True)
class Request:
    """A call's arguments say whom it is for: `epoch` is the callee's, as the caller knew it when it began to call."""

    number: int
    method: str
    generation: int
    epoch: int
    internal: bool
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    """It repeats the arguments."""

    request: Request
    value: Any = None


@dataclass(frozen=True)
class Cancelled:
    """Nobody waits for an answer."""

    number: int


class Closed:
    """The end of a connection, after what was sent by it."""


class Connection:
    """From the session that calls to the one that is called."""

    def __init__(self, caller: Session, callee: Session) -> None:
        self.caller, self.callee, self.ends = caller, callee, {caller, callee}
        simulation = caller.worker.simulation
        self._network = simulation.network
        self.requests = Pipe(simulation, caller.worker, callee.worker, self._requested, self._held_up)
        self.answers = Pipe(simulation, callee.worker, caller.worker, self._answered, self._held_up)

    def _held_up(self) -> float:
        """Seconds until what is sent now gets through. The kernel gives up after a while."""
        until = self._network.cut_until(self.caller.worker.rank, self.callee.worker.rank)
        wait = until - self.caller.clock.now
        if wait <= 2 * LEASE:
            return max(0.0, wait)
        self.caller.clock.at(2 * LEASE, None, self.reset)
        return math.inf

    def reset(self) -> None:
        """Both ends learn that it is broken."""
        for end in (self.caller, self.callee):
            end.clock.at(0, end.worker, self._closed, end)

    def close(self, end: Session) -> None:
        """One end closes it."""
        if end in self.ends:
            self.ends.discard(end)
            end.connections.pop(self, None)
            (self.requests if end is self.caller else self.answers).close(Closed())

    def _closed(self, end: Session) -> None:
        if end in self.ends:
            self.close(end)
            end.take(end.core.closed(self, "the connection was closed"))

    def _requested(self, message: Request | Cancelled | Closed) -> None:
        if isinstance(message, Closed):
            self._closed(self.callee)
        elif self.callee in self.ends:
            self.callee.requested(self, message)

    def _answered(self, message: Reply | Closed) -> None:
        if isinstance(message, Closed):
            self._closed(self.caller)
        elif self.caller in self.ends:
            self.caller.answered(self, message)


class Session:
    """The links and calls of `worker` in the generation of `attachment`."""

    def __init__(self, worker: Worker, attachment: Attachment) -> None:
        self.worker, self.simulation, self.clock = worker, worker.simulation, worker.clock
        self.attachment, self.me = attachment, attachment.me
        self.part = PartId(attachment.generation, attachment.me.join)
        self.core = Links()
        self.connections: dict[Connection, None] = {}
        self.lost: set[str] = set()
        self.given_up: set[tuple[str, int]] = set()  # parts that are neither called nor served any more
        self.serves = self.over = False
        self._held: list[tuple[Connection, Request]] = []  # until it serves
        self._running: dict[tuple[Connection, int], float] = {}  # since when
        self.live: dict[Call, tuple[Request, Then]] = {}  # calls whose callers wait
        self._ticks_at = math.inf
        self.answer: Any = None  # the last one
        # at rank 0
        self.addresses: dict[str, Session] = {}
        self._expected = {peer.name for peer in attachment.members}
        self._ready = {self.me.name}
        self._meeting: list[tuple[Connection, Request]] = []
        for peer in attachment.members:
            self.take(self.core.joined(peer.name, peer.join))
        for name in attachment.lost:
            self.lose(name)

    # -- who is in the generation, as context/group.py has it

    def update(self, attachment: Attachment) -> None:
        """Others have joined or were lost."""
        before = {peer.name: peer for peer in self.attachment.members}
        for peer in attachment.members:
            known = before.get(peer.name)
            if known is None or known.join < peer.join:
                if known is not None:  # and is back already
                    self.lose(peer.name)
                self.lost.discard(peer.name)
        self.attachment = attachment
        for peer in attachment.members:
            self.take(self.core.joined(peer.name, peer.join))
            if peer.name in attachment.lost:
                self.lose(peer.name)
            elif peer not in before.values():
                self._changed(peer.name)
        self._look()

    def _changed(self, name: str) -> None:
        """A peer has joined, or was lost."""
        if self.worker.keeper:
            self.worker.keeper.changed(name)

    def lose(self, name: str) -> bool:
        """Goes on without a peer. Returns False if it was lost before."""
        peer = next(peer for peer in self.attachment.members if peer.name == name)
        if name in self.lost:
            return False
        self.lost.add(name)
        self.take(self.core.lose(name, peer.join, "it was lost"))
        self.given_up.add((name, peer.join))
        # after the other effects of the batch that this may be one of
        self.clock.at(0, self.worker, self.simulation.promises.ends_calls, self, name, peer.join)
        self._changed(name)
        self._look()
        return True

    def end(self) -> None:
        """Nothing of it is executed or answered any more."""
        self.over = True
        self.take(self.core.end(f"generation {self.part.generation} has ended"))
        self.simulation.promises.ends_calls(self)

    def break_off(self) -> None:
        """The process has ended, and its connections are closed."""
        self.over = True
        for connection in [*self.connections]:
            connection.close(self)

    # -- it meets the others

    def meet(self) -> None:
        """Learns from rank 0 where the others are. The worker's `met` or `not_met` follows."""
        rank0 = self.attachment.members[0].name
        if self.me.rank == 0:
            self._arrived(self)
        else:
            self.call(rank0, "meet", CONNECT_TIMEOUT, self._met, internal=True)

    def _met(self, error: Exception | None) -> None:
        if error:
            self.worker.not_met(self.part, error)
            return
        rank0 = self.attachment.members[0].name
        self.take(self.core.forget(rank0))
        self.call(rank0, "ready", CONNECT_TIMEOUT, lambda _: None, internal=True)
        self.worker.connected(self.part)

    def _arrived(self, session: Session) -> None:
        known = self.addresses.get(session.me.name)
        if known is None or known.part.join <= session.part.join:
            self.addresses[session.me.name] = session
            self._look()

    def _look(self) -> None:
        """At rank 0: whether all have come, and know it."""
        if self.me.rank != 0 or not self.addresses or self.over:
            return
        expected = self._expected - self.lost
        if expected <= self.addresses.keys():
            meeting, self._meeting = self._meeting, []
            for connection, request in meeting:
                self._answer(connection, request)
        if expected <= self._ready:
            self.worker.connected(self.part)

    # -- calls

    def call(
        self,
        to: str,
        method: str,
        seconds: float,
        then: Then,
        *,
        internal: bool = False,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Calls a peer; `then` follows, with the error if there is one."""
        wait = 0.0 if internal else CONNECT_TIMEOUT
        deadline = Deadline(seconds, "TIMEOUT", wait=wait, wait_setting="CONNECT_TIMEOUT")
        call = Call(to, method, deadline, internal=internal)
        link = self.core.begin(call, self.worker.now)
        request = Request(call.number, method, self.part.generation, self.core.peer(to).epoch, internal, arguments)
        self.live[call] = request, then
        self.simulation.promises.calls(self, call)
        if link is not None:
            self._send(call)
        self.take(self.core.batch())

    def _send(self, call: Call) -> None:
        if call in self.live:
            call.written = True
            call.link.requests.send(self.live[call][0])

    def _finish(self, call: Call, error: Exception | None) -> None:
        if call in self.live:
            self.live.pop(call)[1](error)

    def take(self, batch: effects.Batch) -> None:
        """Does what the links require."""
        for effect in batch.effects:
            self._do(effect)
        if self.core.due < self._ticks_at:
            self._ticks_at = self.core.due
            self.worker.at(self._ticks_at, self._tick, self._ticks_at)

    def _tick(self, due: float) -> None:
        if due == self._ticks_at:
            self._ticks_at = math.inf
            self.take(self.core.tick(self.worker.now))

    def _do(self, effect: effects.Effect) -> None:
        now, worker = self.worker.now, self.worker
        match effect:
            case effects.Connect(peer, epoch, attempt):
                self.clock.at(self._delay(), worker, self._dial, peer, epoch, attempt, now + CONNECT_TIMEOUT)
            case effects.Flush(link):
                self._flush(link)
            case effects.Send(call):
                self._send(call)
            case effects.Fail(call, error):
                self._finish(call, error)
            case effects.Cancel(call):
                call.link.requests.send(Cancelled(call.number))
            case effects.Close(link):
                link.close(self)
            case effects.Examine(peer, calls):
                there = self._reaches(calls[0].link)
                self.clock.at(self._delay() if there else EXAMINE, worker, self._examined, calls, there)
            case effects.ReportLost(peer, epoch):
                worker.disconnected(self, peer, epoch)

    def _flush(self, link: Connection) -> None:
        """Sends what has waited for a link, one after the other."""
        call = self.core.next_waiting(link, self.worker.now)
        if call is not None:
            self._send(call)
            self.clock.at(self._delay(), self.worker, self._flush, link)
        self.take(self.core.batch())

    def _delay(self) -> float:
        return self.clock.random.random() * 0.02

    def _reaches(self, link: Connection) -> bool:
        """Whether the callee replies at once."""
        there = link.callee in link.ends and not link.callee.worker.frozen
        return there and self.simulation.network.cut_until(self.worker.rank, link.callee.worker.rank) <= self.clock.now

    def _examined(self, calls: tuple[Call, ...], there: bool) -> None:
        callee, now = calls[0].link.callee, self.clock.now
        begun = [callee._running.get((call.link, call.number)) for call in calls]
        running = tuple(None if since is None else now - since for since in begun)
        said = Examined(running, callee.serves, {}, ("",) * len(calls)) if there else None
        self.take(self.core.examined(calls, said, self.worker.now))

    # -- connections

    def _dial(self, name: str, epoch: int, attempt: int, end: float, pause: float = 0.05) -> None:
        """Connects to a peer that is there at `epoch`, or a later one; tries again and again."""
        if self.over:
            return
        callee = self._find(name, epoch)
        if callee is not None and self._is_taken(callee, name):
            connection = Connection(self, callee)
            for session in (self, callee):
                session.connections[connection] = None
            callee.take(callee.core.accepted(self.me.name, connection, self.me.join))
            self.take(self.core.connected(name, attempt, connection, callee.me.join, self.worker.now))
        elif self.worker.now + pause > end:
            error = PeerLostError(f"{name} cannot be reached")
            self.take(self.core.not_connected(name, attempt, error))
        else:
            self.clock.at(pause, self.worker, self._dial, name, epoch, attempt, end, min(2 * pause, 1.0))

    def _find(self, name: str, epoch: int) -> Session | None:
        """Where a peer is: rank 0's address is known to all, and rank 0 knows the others'."""
        rank0 = self.simulation.first.worker
        if name == self.attachment.members[0].name:
            return rank0.session if rank0 else None
        first = self.simulation.workers.get((self.part.generation, self.simulation.rank0))
        known = first.session.addresses.get(name) if first and first.session else None
        return known if known is not None and known.part.join >= epoch else None

    def _is_taken(self, callee: Session, name: str) -> bool:
        """Whether the other end takes the connection, by what it says of itself."""
        worker = callee.worker
        there = worker.exists and not worker.frozen and not callee.over and callee.me.name == name
        if not there or self.simulation.network.cut_until(self.worker.rank, worker.rank) > self.clock.now:
            return False
        return callee.part.generation == self.part.generation or not self.simulation.safeguards.hello

    # -- what arrives

    def requested(self, connection: Connection, message: Request | Cancelled) -> None:
        """A peer calls, or waits no more."""
        if isinstance(message, Cancelled):
            self._running.pop((connection, message.number), None)
        elif message.internal or self.serves:
            self._execute(connection, message)
        else:
            self._held.append((connection, message))

    def serve(self) -> None:
        """Peers' calls are carried out from now on."""
        self.serves = True
        held, self._held = self._held, []
        for connection, request in held:
            if self in connection.ends:
                self._execute(connection, request)

    def _execute(self, connection: Connection, request: Request) -> None:
        self.simulation.promises.executes(self, connection.caller, request)
        if request.method == "meet":
            self._meeting.append((connection, request))
            self._arrived(connection.caller)
            return
        if request.method == "ready":
            self._ready.add(connection.caller.me.name)
            self._look()
        self._running[connection, request.number] = self.clock.now
        seconds = self.clock.random.choice((0.001, 0.01, 0.02, 0.1)) if request.method != "ask" else 4.0
        self.clock.at(seconds, self.worker, self._executed, connection, request)

    def _executed(self, connection: Connection, request: Request) -> None:
        if self._running.pop((connection, request.number), None) is not None:
            value = None
            if request.method.startswith("copies"):
                worker, promises = self.worker, self.simulation.promises
                value = worker.rank.store.perform(promises, worker, request.method, request.arguments)
            self._answer(connection, request, value)

    def _answer(self, connection: Connection, request: Request, value: Any = None) -> None:
        if self in connection.ends:
            self.simulation.promises.answers(self, request)
            connection.answers.send(Reply(request, value))

    def answered(self, connection: Connection, reply: Reply) -> None:
        """The answer of a call has come."""
        call = self.core.sent(reply.request.number, connection)
        if call is not None and self.core.answered(call, self.worker.now):
            self.simulation.promises.takes_answer(self, connection.callee, self.live[call][0], reply.request)
            self.answer = reply.value
            self._finish(call, None)
        self.take(self.core.batch())
