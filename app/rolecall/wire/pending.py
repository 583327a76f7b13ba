"""Calls that have no answer yet, and links that are being made."""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rolecall.wire.codec import Encoded
from rolecall.wire.future import Future
from rolecall.wire.link import MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, Link
from rolecall.wire.messages import Deadline, Request

Ended = Callable[[Any, Exception | None, int], None]  # with the answer, or the error; and the answer's bytes


@dataclass(eq=False)
class Pending:
    """A call without an answer. `expires` is in monotonic seconds, infinite without a deadline."""

    to: str
    request: Request
    deadline: Deadline
    ended: Ended | None
    expires: float
    future: Future[Any] = field(init=False)
    number: int = 0
    link: Link | None = None  # None while that is made
    nbytes: int = 0
    has_room: bool = False  # it counts as in flight
    sent: bool = False
    urgent: bool = False  # it is sent whatever is in flight
    extended: bool = False  # it had to wait until the peer was ready
    began: float = field(default_factory=time.monotonic)
    items: queue.SimpleQueue[tuple[Any, Exception | None, bool]] | None = None  # of a stream; the last is marked


class Opening:
    """A link to a peer's part number `join` that is being made, and the calls that wait for it."""

    def __init__(self, join: int) -> None:
        self.join = join
        self.waiting = deque[tuple[Pending, Encoded]]()
        self.nbytes = 0
        self.link: Link | None = None  # once it is made, until the waiting calls are sent
        self.settled: concurrent.futures.Future[None] = concurrent.futures.Future()  # with the error, if there is one

    def fits(self, nbytes: int) -> bool:
        """Whether a call of `nbytes` may wait here."""
        fits = self.nbytes + nbytes <= MAX_IN_FLIGHT_BYTES and len(self.waiting) < MAX_IN_FLIGHT
        return fits or not self.waiting
