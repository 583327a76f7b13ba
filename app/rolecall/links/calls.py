"""A call, its deadline, and the errors of one that is late."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rolecall.errors import CallTimeoutError, PeerLostError

CallState = Literal["queued", "linking", "sent", "examined", "answered", "given up"]


class Deadline(float):
    """A call's deadline in seconds, 0 for none; `setting` names the setting that it comes from. If `from_begin`, it
    runs from when the method begins. A call whose peer is not ready yet, or that waits behind others if `from_begin`,
    has `wait` seconds more; `wait_setting` names that bound. Once it has passed, a call whose method runs, as its peer
    says, has the deadline `running` instead, if there is one."""

    setting: str
    wait: float
    wait_setting: str
    from_begin: bool
    running: Deadline | None

    def __new__(
        cls,
        seconds: float,
        setting: str = "",
        *,
        wait: float = 0.0,
        wait_setting: str = "",
        from_begin: bool = False,
        running: Deadline | None = None,
    ) -> Deadline:
        """A deadline of `seconds`."""
        self = super().__new__(cls, seconds)
        self.setting, self.wait, self.wait_setting, self.from_begin = setting, wait, wait_setting, from_begin
        self.running = running
        return self

    @property
    def total(self) -> float:
        """Seconds within which the call ends, whatever it waits for; 0 for no such bound."""
        return (self.running or self) + self.wait if self else 0.0


@dataclass(eq=False, slots=True)
class Call:
    """A call of `method` at the peer `to`, of `nbytes`. One that is `internal` is not examined; one that is `urgent`
    is sent whatever is in flight; a `stream` has no deadline but while its reader waits (`Links.expect`).

    `Links` sets the rest; the driver sets `written` once the request has left.
    """

    to: str
    method: str
    deadline: Deadline
    nbytes: int = 0
    internal: bool = False
    urgent: bool = False
    stream: bool = False
    number: int = field(default=0, init=False)
    state: CallState = field(default="linking", init=False)
    link: Any = field(default=None, init=False)  # that it is sent by
    began: float = field(default=0.0, init=False)  # as its deadline sees it, in the seconds of the clock
    expires: float = field(default=math.inf, init=False)
    extended: bool = field(default=False, init=False)  # it had to wait until the peer was ready
    has_room: bool = field(default=False, init=False)  # it counts as in flight
    written: bool = field(default=False, init=False)

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ("answered", "given up")

    @property
    def queue_seconds(self) -> float:
        """How long it may wait for room, from its begin; infinite without a deadline."""
        deadline = self.deadline
        if not deadline or self.stream:
            return math.inf
        return deadline + deadline.wait if deadline.from_begin else float(deadline)

    def late_error(self, *, begun: bool, reason: str = "") -> CallTimeoutError:
        """Its error, if its method has `begun` or not, with the `reason` that the peer gives."""
        deadline, setting = self.deadline, self.deadline.setting
        seconds = float(deadline)
        if not begun and deadline.wait and (deadline.from_begin or self.extended):
            seconds, setting = deadline + deadline.wait, deadline.wait_setting
        why = f"{setting}; it has not begun"
        if begun:
            why = f"{setting}; options(timeout=) gives it more" if deadline.from_begin else setting
        reason = f": it {reason}" if reason else ""
        return CallTimeoutError(f"{self.to} has not answered {self.method} within {seconds:g} s ({why}){reason}")

    def queued_error(self) -> CallTimeoutError:
        """Its error, if there was no room for it in time."""
        deadline = self.deadline
        setting = deadline.wait_setting if deadline.from_begin else deadline.setting
        seconds = f"{self.queue_seconds:g} s ({setting})"
        return CallTimeoutError(f"{self.to} has not answered earlier calls of {self.method} within {seconds}")

    def more_seconds(self, now: float, running: float | None, *, known: bool, ready: bool) -> float:
        """What is left of its deadline; 0 if it is late. Its method has been `running` for so long, None if it has not
        begun; that is `known` if the peer has said so. The peer is `ready` if the role's object is there."""
        if running is not None and self.stream:  # which may run for ever: an item is waited for
            limit = self.deadline.running or self.deadline
            more = max(0.0, limit - (now - self.began))
            self.deadline = self.deadline if more else limit
            return more
        if running is not None and self.deadline.running:
            self.deadline = self.deadline.running
        deadline = self.deadline
        if running is not None:
            return max(0.0, deadline - running) if deadline.from_begin or self.extended else 0.0
        if ready and not (known and (deadline.from_begin or self.extended)):
            return 0.0
        self.extended = not ready  # the peer has just become ready: it has the whole deadline once more
        return max(0.0, min(float(deadline), deadline + deadline.wait - (now - self.began)))


class Examined(NamedTuple):
    """What a peer says of calls: for how many seconds each has run (None: it waits, or is not there), whether the
    role's object is there yet, the stacks of each method, and what each call waits for, if that is known."""

    running: tuple[float | None, ...]
    served: bool
    stacks: dict[str, str]
    reasons: tuple[str, ...]


def frozen_error(late: CallTimeoutError) -> PeerLostError:
    """The error of a late call whose peer does not send its stacks either."""
    error = PeerLostError(f"{late}, nor sends its stacks: it is frozen or cut off")
    error.__cause__ = late
    return error


def lost_error(peer: str, problem: str) -> PeerLostError:
    """The error of a call to a peer that is not there."""
    return PeerLostError(f"{peer} does not answer: {problem}")
