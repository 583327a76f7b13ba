"""What a driver is told to do, in order. Calls, links and listeners are the objects that it has passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rolecall.errors import CallError
from rolecall.links.calls import Examined


@dataclass(frozen=True)
class Connect:
    """Connect to `peer` at its `epoch`, or a later one. `connected` or `not_connected` follows, with the `attempt`."""

    peer: str
    epoch: int
    attempt: int


@dataclass(frozen=True)
class Flush:
    """Send the calls that have waited for the `link`, one after the other, as `next_waiting` says."""

    link: Any


@dataclass(frozen=True)
class Send:
    """There is room for a call now: have its caller, who waits for that, send it by its link."""

    call: Any


@dataclass(frozen=True)
class Fail:
    """A call has ended with an error."""

    call: Any
    error: CallError


@dataclass(frozen=True)
class Cancel:
    """Tell the peer that nobody waits for a call."""

    call: Any


@dataclass(frozen=True)
class Close:
    """Close a link because of `problem`."""

    link: Any
    problem: str


@dataclass(frozen=True)
class Examine:
    """Ask `peer` what the calls do. `examined` follows."""

    peer: str
    calls: tuple[Any, ...]


@dataclass(frozen=True)
class Late:
    """Calls of one method at one peer are late: log that, with what the peer has said, None if nothing. They fail."""

    calls: tuple[Any, ...]
    said: Examined | None


@dataclass(frozen=True)
class Tell:
    """Tell who listens that `peer` is disconnected."""

    peer: str
    listeners: tuple[Any, ...]


@dataclass(frozen=True)
class ReportLost:
    """The link that was made to `peer`, at its `epoch`, has broken."""

    peer: str
    epoch: int
    problem: str


Effect = Connect | Flush | Send | Fail | Cancel | Close | Examine | Late | Tell | ReportLost


@dataclass(frozen=True)
class Batch:
    """What is to be done now, in order, and when `tick` is due."""

    effects: tuple[Effect, ...] = ()
    deadline: float = math.inf
