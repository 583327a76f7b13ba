"""When a packet arrives: rate, delay, queue and loss of the ranks' links. Pure: no clock, no I/O."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.link.links import Link


class Direction:
    """One direction of a link: packets pass one after the other, each for as long as its bytes take at the rate, and
    arrive `delay` seconds later. Those that wait take up to `queue` bytes.
    """

    def __init__(self, bits_per_s: float, delay: float, queue: int) -> None:
        self._bytes_per_s, self._delay, self._queue = bits_per_s / 8, delay, queue
        self._free = -math.inf  # when the last packet has passed

    def arrival(self, now: float, size: int) -> float | None:
        """When a packet of `size` bytes that comes at `now` is at the other end; None where the queue is full. Calls
        are in the order of `now`.
        """
        begin = max(now, self._free)
        if (begin - now) * self._bytes_per_s > self._queue:
            return None
        self._free = begin + size / self._bytes_per_s
        return self._free + self._delay


@dataclass(order=True)
class _Passing:
    """A packet between two ranks: until it has passed the sender's link, then the receiver's."""

    at: float
    number: int  # of two at the same time, the first to come is the first to go
    up: bool = field(compare=False)
    target: int = field(compare=False)
    size: int = field(compare=False)
    packet: bytes = field(compare=False)


class Network:
    """`ranks` ranks, each with a `link`, up and down apart. A way leads through two links, a round trip through four,
    each with a quarter of the round trip's delay. `chance` returns numbers in [0, 1).
    """

    def __init__(self, link: Link, ranks: int, chance: Callable[[], float]) -> None:
        def directions() -> Sequence[Direction]:
            return [Direction(link.bits_per_s, link.round_trip / 4, link.queue_bytes) for _ in range(ranks)]

        self._up, self._down = directions(), directions()
        self._loss, self._chance = link.loss, chance
        self._passing: list[_Passing] = []
        self._count = 0
        self.lost = self.dropped = 0  # packets: by chance, by a full queue

    def send(self, now: float, source: int, target: int, size: int, packet: bytes) -> None:
        """Rank `source` sends rank `target` a packet of `size` bytes. Calls are in the order of `now`, and come after
        `arrived(now)`.
        """
        self._enter(self._up[source], now, True, target, size, packet)

    def arrived(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The packets that have arrived until `now`, with their targets, in order."""
        while self._passing and self._passing[0].at <= now:
            one = heapq.heappop(self._passing)
            if not one.up:
                yield one.target, one.packet
            elif self._loss and self._chance() < self._loss:
                self.lost += 1
            else:
                self._enter(self._down[one.target], one.at, False, one.target, one.size, one.packet)

    @property
    def next(self) -> float | None:
        """When to look again; None: not before there is something to send."""
        return self._passing[0].at if self._passing else None

    def _enter(self, direction: Direction, now: float, up: bool, target: int, size: int, packet: bytes) -> None:
        at = direction.arrival(now, size)
        if at is None:
            self.dropped += 1
            return
        self._count += 1
        heapq.heappush(self._passing, _Passing(at, self._count, up, target, size, packet))
