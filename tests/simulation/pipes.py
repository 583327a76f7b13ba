"""What messages pass between two processes: they arrive in order, after a while."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Pipe:
    """One direction: what `sender` writes, `read` takes in the process `receiver`."""

    def __init__(
        self,
        simulation: Simulation,
        sender: Process,
        receiver: Process,
        read: Callable[[Any], None],
        held_up: Callable[[], float] | None = None,
    ) -> None:
        self.simulation, self.sender, self.receiver, self._read = simulation, sender, receiver, read
        self._held_up = held_up  # for so many seconds; infinite: it gets lost
        self._messages: deque[Any] = deque()

    def send(self, message: Any, then: Callable[[], None] | None = None) -> None:
        """`sender` writes a message, if it lives to do so, and goes on; faults may strike at each message."""
        name = type(message).__name__
        self.simulation.ambushes.at_message(name, self.sender, self.receiver, self._write, message, then)

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def close(self, end: Any) -> None:
        """`sender` has ended: `end` arrives after what it has sent."""
        self._write(end)

    def _write(self, message: Any, then: Callable[[], None] | None = None) -> float:
        self._messages.append(message)
        delay = self.simulation.clock.random.random() * 0.01
        if self._held_up:
            delay += self._held_up()
        if delay < math.inf:
            self.simulation.clock.at(delay, self.receiver, self._take)
        if then:
            then()
        return delay

    def _take(self) -> None:
        if self._messages:
            message = self._messages.popleft()
            if self.simulation.story.trace and self._held_up is None:
                self.simulation.story.log(f"{self.receiver.rank.name}: {type(message).__name__}")
            self._read(message)
