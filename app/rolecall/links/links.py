"""Which peer is called by which connection, at which epoch; what a call waits for, and how it ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rolecall.errors import CallError, PeerLostError
from rolecall.links import effects
from rolecall.links.calls import Call, CallState, Examined, frozen_error, lost_error
from rolecall.links.effects import Batch, Effect

MAX_IN_FLIGHT_BYTES = 128 * 2**20  # of requests to a peer without an answer; a larger one goes alone
MAX_IN_FLIGHT = 4096  # requests to a peer without an answer
JOINED_AGAIN = "it has joined again"
CLOSED = "the connection was closed"
LinkState = Literal["absent", "connecting", "up", "lost"]


@dataclass(eq=False, slots=True)
class Peer:
    """A peer and the link to it, which belongs to the peer's `epoch`."""

    name: str
    epoch: int = 0
    state: LinkState = "absent"
    problem: str = ""  # why it is lost
    attempt: int = 0  # the newest one to connect
    link: Any = None  # once it is made; while it is connecting, what waits is sent by it
    ready: bool = False  # the role's object has answered
    in_flight: int = 0  # calls that have room
    nbytes: int = 0  # of these
    waiting: deque[Call] = field(default_factory=deque)  # for the link
    queue: deque[Call] = field(default_factory=deque)  # for room
    listeners: list[Any] = field(default_factory=list)

    def fits(self, nbytes: int) -> bool:
        """Whether a call of `nbytes` may be in flight."""
        fits = self.nbytes + nbytes <= MAX_IN_FLIGHT_BYTES and self.in_flight < MAX_IN_FLIGHT
        return fits or not self.in_flight

    def take_room(self, call: Call) -> None:
        """A call is in flight from now on."""
        self.in_flight += 1
        self.nbytes += call.nbytes
        call.has_room = True


class Links:
    """The links of one member in one session, and its calls. The driver calls a method for each event, one at a time,
    and does what the returned batch says, in order. `begin` and `answered`, the events of each call, return a plain
    result: what else follows from them is in `effects` until `batch` takes it. Times are monotonic seconds.

    A link is any hashable object that the driver passes in. `tick` is due at `due`, or earlier than that needs be.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}  # that are live, by number
        self.due = math.inf
        self.effects: list[Effect] = []
        self._peers: dict[str, Peer] = {}
        self._links: dict[Hashable, Peer] = {}  # to peers
        self._accepted: dict[Hashable, tuple[str, int]] = {}  # from peers, at an epoch
        self._count = self._attempts = 0
        self._over = ""  # why everything fails

    def batch(self) -> Batch:
        """What is to be done."""
        effects, self.effects = tuple(self.effects), []
        return Batch(effects, self.due)

    # ---- what is known

    def peer(self, name: str) -> Peer:
        """A peer, which may never have been heard of."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name)
        return peer

    def link_to(self, name: str) -> Any:
        """The link by which calls are sent at once; None if there is none."""
        peer = self._peers.get(name)
        return peer.link if peer is not None and peer.state == "up" else None

    def has_lost(self, name: str) -> bool:
        """Whether a peer was lost, or its link has broken."""
        peer = self._peers.get(name)
        return peer is not None and peer.state == "lost"

    def in_flight(self, name: str) -> int:
        """Calls to a peer without an answer."""
        peer = self._peers.get(name)
        return peer.in_flight if peer is not None else 0

    def problem(self, name: str, epoch: int) -> str:
        """Why a peer, at an epoch, is neither called nor served; empty if it is."""
        peer = self.peer(name)
        if self._over:
            return self._over
        if epoch < peer.epoch:
            return JOINED_AGAIN
        return peer.problem if epoch == peer.epoch else ""

    # ---- calls

    def begin(self, call: Call, now: float) -> Any:
        """A call begins. Returns the link that it is to be sent by at once; otherwise None, and its state says what it
        waits for."""
        self._count += 1
        number = call.number = self._count
        call.began = now
        if call.deadline and not call.stream:
            call.expires = now + call.deadline
        peer = self._peers.get(call.to) or self.peer(call.to)
        if peer.state != "up" or not (call.urgent or peer.fits(call.nbytes)):
            return self._begin_to_wait(call, peer, now)
        self.calls[number] = call
        if not call.urgent:
            peer.in_flight += 1
            peer.nbytes += call.nbytes
            call.has_room = True
        call.state, link = "sent", peer.link
        call.link = link
        if call.expires < self.due:
            self.due = call.expires
        return link

    def _begin_to_wait(self, call: Call, peer: Peer, now: float) -> None:
        if problem := self.problem(peer.name, peer.epoch):
            call.state = "given up"
            self.effects.append(effects.Fail(call, lost_error(peer.name, problem)))
            return
        self.calls[call.number] = call
        if call.urgent or peer.fits(call.nbytes):
            call.state = "linking"
            if not call.urgent:
                peer.take_room(call)
            peer.waiting.append(call)
            if peer.state == "absent":
                self._connect(peer)
        else:
            call.state, call.expires = "queued", now + call.queue_seconds
            peer.queue.append(call)
        self.due = min(self.due, call.expires)

    def sent(self, number: int, link: Hashable) -> Call | None:
        """The live call of that number, if it was sent by `link`: no other peer answers it."""
        call = self.calls.get(number)
        return call if call is not None and call.link is link else None

    def answered(self, call: Call, now: float) -> bool:
        """The answer of a call that was sent has come, or what its method raised. Returns False if it has ended
        before."""
        if self.calls.pop(call.number, None) is None:
            return False
        call.state = "answered"
        peer = self._peers[call.to]
        if call.has_room:
            peer.in_flight -= 1
            peer.nbytes -= call.nbytes
        if not call.internal:
            peer.ready = True
        if peer.queue:
            self._admit(peer, now)
        return True

    def expect(self, call: Call, now: float) -> None:
        """The reader of a stream waits for an item: it comes before the deadline. `batch` has no news."""
        if call.live:
            if call.state == "examined":  # it has got an item meanwhile
                call.state = "sent"
            call.began, call.expires = now, now + call.deadline if call.deadline else math.inf
            self.due = min(self.due, call.expires)

    def item(self, call: Call) -> None:
        """An item of a stream was taken: its reader does not wait."""
        if call.state == "examined":
            call.state = "sent"
        call.expires = math.inf
        self._peers[call.to].ready = True

    def cancelled(self, call: Call, now: float) -> Batch:
        """Nobody waits for the answer of a call any more."""
        if call.live:
            self._remove(call, "given up")
            self._cancel(call)
            self._admit(self._peers[call.to], now)
        return self.batch()

    def _remove(self, call: Call, state: CallState) -> None:
        """A live call ends."""
        peer = self._peers[call.to]
        if call.state == "linking":
            peer.waiting.remove(call)
        elif call.state == "queued":
            peer.queue.remove(call)
        call.state = state
        del self.calls[call.number]
        if call.has_room:
            peer.in_flight -= 1
            peer.nbytes -= call.nbytes

    def _fail(self, call: Call, error: CallError) -> None:
        self._remove(call, "given up")
        self.effects.append(effects.Fail(call, error))

    def _cancel(self, call: Call) -> None:
        if call.link in self._links:
            self.effects.append(effects.Cancel(call))

    def _admit(self, peer: Peer, now: float) -> None:
        """Sends calls that wait for room, as far as there is some. One that does not fit holds up no other."""
        for call in [*peer.queue] if peer.state == "up" else ():
            if peer.fits(call.nbytes):
                peer.queue.remove(call)
                peer.take_room(call)
                self._send(call, peer, now)
                self.effects.append(effects.Send(call))

    def _send(self, call: Call, peer: Peer, now: float) -> None:
        """A call that has waited is sent. If its deadline runs from when it begins, the wait does not count."""
        call.state, call.link = "sent", peer.link
        if call.deadline and not call.stream:
            call.began = now if call.deadline.from_begin else call.began
            call.expires = call.began + call.deadline
            self.due = min(self.due, call.expires)

    # ---- links to peers

    def _connect(self, peer: Peer) -> None:
        self._attempts += 1
        peer.state, peer.attempt = "connecting", self._attempts
        self.effects.append(effects.Connect(peer.name, peer.epoch, peer.attempt))

    def connected(self, name: str, attempt: int, link: Hashable, epoch: int, now: float) -> Batch:
        """A connection to a peer is made, which is there at `epoch`."""
        peer = self.peer(name)
        if not self._is_newest(peer, attempt):
            self.effects.append(effects.Close(link, self.problem(name, epoch)))
        elif epoch < peer.epoch:
            self.effects.append(effects.Close(link, JOINED_AGAIN))
            self._give_up(peer, lost_error(name, JOINED_AGAIN))
        else:
            if epoch > peer.epoch:
                self._replace(peer, epoch)
            peer.link, peer.ready, self._links[link] = link, False, peer
            self.effects.append(effects.Flush(link))
        return self.batch()

    def _is_newest(self, peer: Peer, attempt: int) -> bool:
        return peer.state == "connecting" and peer.attempt == attempt and peer.link is None

    def next_waiting(self, link: Hashable, now: float) -> Call | None:
        """The next call that has waited for a link, to be sent by it. Those that come meanwhile wait behind. After the
        last one the link is up."""
        peer = self._links.get(link)
        if peer is None or peer.state != "connecting":
            return None
        if not peer.waiting:
            peer.state = "up"
            self._admit(peer, now)
            return None
        call = peer.waiting.popleft()
        self._send(call, peer, now)
        return call

    def not_connected(self, name: str, attempt: int, error: PeerLostError) -> Batch:
        """No connection to a peer can be made. It is not lost: the next call tries again."""
        peer = self.peer(name)
        if self._is_newest(peer, attempt):
            self._give_up(peer, error)
        return self.batch()

    def _give_up(self, peer: Peer, error: PeerLostError) -> None:
        peer.state = "absent"
        self._fail_all([*peer.waiting, *peer.queue], error)
        self._tell(peer)

    def _fail_all(self, calls: Iterable[Call], error: CallError) -> None:
        for call in calls:
            self._fail(call, error)

    def _tell(self, peer: Peer) -> None:
        if peer.listeners:
            self.effects.append(effects.Tell(peer.name, tuple(peer.listeners)))
            peer.listeners = []

    def closed(self, link: Hashable, problem: str) -> Batch:
        """A link has ended by itself."""
        self._accepted.pop(link, None)
        if link in self._links:
            self._lose_link(link, problem or CLOSED)
        return self.batch()

    def _lose_link(self, link: Hashable, problem: str) -> None:
        """The link to a peer has broken: it is lost."""
        peer = self._links[link]
        self._drop(peer, problem)
        peer.state, peer.problem = "lost", problem
        self._fail_all([*peer.waiting, *peer.queue], lost_error(peer.name, problem))
        self.effects.append(effects.ReportLost(peer.name, peer.epoch, problem))
        self._tell(peer)

    def _drop(self, peer: Peer, problem: str) -> None:
        """The link to a peer has gone, and with it the calls that were sent by it."""
        if peer.link is not None:
            link, peer.link = peer.link, None
            del self._links[link]
            self._fail_all([call for call in self.calls.values() if call.link is link], lost_error(peer.name, problem))

    def _close(self, peer: Peer, problem: str) -> None:
        """Closes the link to a peer, if there is one, and those from it."""
        if peer.link is not None:
            self.effects.append(effects.Close(peer.link, problem))
            self._drop(peer, problem or CLOSED)
        for link in [link for link, (name, _) in self._accepted.items() if name == peer.name]:
            del self._accepted[link]
            self.effects.append(effects.Close(link, problem))

    def forget(self, name: str) -> Batch:
        """Closes the link to a peer without losing it: the next call makes another, as does what waits."""
        peer = self.peer(name)
        if peer.link is not None:
            self.effects.append(effects.Close(peer.link, ""))
            self._drop(peer, CLOSED)
            peer.state = "absent"
            if peer.waiting or peer.queue:
                self._connect(peer)
        return self.batch()

    def listen(self, name: str, listener: object) -> Batch:
        """`listener` wants to know as soon as the link to a peer has ended, or cannot be made."""
        peer = self.peer(name)
        peer.listeners.append(listener)
        if self.problem(name, peer.epoch):
            self._tell(peer)
        elif peer.state == "absent":
            self._connect(peer)
        return self.batch()

    # ---- peers

    def accepted(self, name: str, link: Hashable, epoch: int) -> Batch:
        """A peer has connected, at `epoch`, to call this member. It is refused if it is lost, or has joined again."""
        if not self._over and epoch > self.peer(name).epoch:
            self._join(self.peer(name), epoch)
        if problem := self.problem(name, epoch):
            self.effects.append(effects.Close(link, problem))
        else:
            self._accepted[link] = name, epoch
        return self.batch()

    def joined(self, name: str, epoch: int) -> Batch:
        """A peer is there at `epoch`. If that is a new one, it is not lost any more."""
        peer = self.peer(name)
        if epoch > peer.epoch and not self._over:
            self._join(peer, epoch)
        return self.batch()

    def _join(self, peer: Peer, epoch: int) -> None:
        self._replace(peer, epoch)
        peer.state, peer.problem = "absent", ""
        if peer.waiting or peer.queue:  # they get the new one
            self._connect(peer)

    def _replace(self, peer: Peer, epoch: int) -> None:
        """A part of a peer takes the place of the one before."""
        peer.epoch = epoch
        self._close(peer, JOINED_AGAIN)
        self._tell(peer)

    def lose(self, name: str, epoch: int, problem: str) -> Batch:
        """Refuses a peer at `epoch` from now on, unless it is there at a later one: its links are closed, and calls to
        it fail."""
        peer = self.peer(name)
        if epoch >= peer.epoch and not self._over:
            peer.epoch = epoch
            self._close(peer, problem)
            peer.state, peer.problem = "lost", problem
            self._fail_all([*peer.waiting, *peer.queue], lost_error(name, problem))
            self._tell(peer)
        return self.batch()

    def end(self, problem: str) -> Batch:
        """The session has ended: closes all links, and fails all calls."""
        self._over, error = problem, PeerLostError(problem)
        self._fail_all([*self.calls.values()], error)
        self.effects += [effects.Close(link, problem) for link in (*self._links, *self._accepted)]
        for peer in self._peers.values():
            peer.state, peer.link = "absent", None
        self._links, self._accepted, self.due = {}, {}, math.inf
        return self.batch()

    # ---- deadlines

    def tick(self, now: float) -> Batch:
        """Moves on to `now`."""
        asked: dict[str, list[Call]] = {}
        for call in [call for call in self.calls.values() if now >= call.expires]:
            if not call.live:  # its link has been closed for another one
                continue
            late = call.queued_error() if call.state == "queued" else call.late_error(begun=True)
            if call.state in ("linking", "queued"):
                unmade = PeerLostError(f"{late}: the connection to it is not made yet")
                self._fail(call, late if self._peers[call.to].state == "up" else unmade)
            elif call.internal:
                self._fail_late([call], late, reads=call.urgent)
            else:
                call.state, call.expires = "examined", math.inf  # until it is known what it does
                asked.setdefault(call.to, []).append(call)
        self.effects += [effects.Examine(name, tuple(calls)) for name, calls in asked.items()]
        for peer in self._peers.values():
            self._admit(peer, now)
        self.due = min((call.expires for call in self.calls.values()), default=math.inf)
        return self.batch()

    def examined(self, calls: Sequence[Call], said: Examined | None, now: float) -> Batch:
        """What a peer has said of its calls; None if it has said nothing."""
        late: dict[tuple[str, bool], list[Call]] = {}
        for place, call in enumerate(calls):
            if call.state != "examined":
                continue
            runs = said.running[place] if said else None
            ready = said.served if said else self._peers[call.to].ready
            more = call.more_seconds(now, runs, known=said is not None, ready=ready)
            if more:
                call.state, call.expires = "sent", now + more
                self.due = min(self.due, call.expires)
            else:
                late.setdefault((call.method, said is None or runs is not None), []).append(call)
        for (_, begun), each in late.items():
            if ended := [call for call in each if call.live]:
                reason = said.reasons[calls.index(ended[0])] if said else ""
                error = ended[0].late_error(begun=begun, reason=reason)
                self.effects.append(effects.Late(tuple(ended), said))
                self._fail_late(ended, error if said else frozen_error(error), reads=said is not None)
            self._admit(self._peers[each[0].to], now)
        return self.batch()

    def _fail_late(self, calls: Sequence[Call], error: CallError, *, reads: bool) -> None:
        """Late calls of one peer end. Unless it `reads`, its link is closed if one of them is still being sent."""
        self._fail_all(calls, error)
        for call in calls:
            self._cancel(call)
        for call in calls:
            if not (reads or call.written) and call.link in self._links:
                self.effects.append(effects.Close(call.link, str(error)))
                self._lose_link(call.link, str(error))
