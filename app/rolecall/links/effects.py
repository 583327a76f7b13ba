"""What a driver is told to do, in order. Calls, links and listeners are the objects that it has passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rolecall.errors import CallError


@dataclass(frozen=True)
class Connect:
    """Connect to `peer` at its `epoch`, or a later one. `connected` or `not_connected` follows, with the `attempt`."""

    peer: str
    epoch: int
    attempt: int


@dataclass(frozen=True)
class Flush:
    """Send the calls, which have waited for the `link`. `flushed` follows."""

    link: Any
    calls: tuple[Any, ...]


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
    """Ask `peer` which of the calls have begun. `examined` follows."""

    peer: str
    calls: tuple[Any, ...]


@dataclass(frozen=True)
class Explain:
    """Calls of one method at one peer are late: log that, with the peer's stacks unless it is `silent`. `explained`
    follows."""

    calls: tuple[Any, ...]
    begun: bool
    silent: bool


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


Effect = Connect | Flush | Send | Fail | Cancel | Close | Examine | Explain | Tell | ReportLost


@dataclass(frozen=True)
class Batch:
    """What is to be done now, in order, and when `tick` is due."""

    effects: tuple[Effect, ...] = ()
    deadline: float = math.inf
