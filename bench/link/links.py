"""The links, by name."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_QUEUE_SECONDS = 0.01
LEAST_QUEUE_BYTES = 2**18  # four of the largest packets that a kernel hands over


@dataclass(frozen=True)
class Link:
    """A rank's link to all others: `bits_per_s` of IP packets in each direction, `round_trip` seconds from one rank to
    another and back, and `loss`, the share of a rank's packets that do not arrive at another.

    What the link cannot take at once waits in a queue, one for each direction; what does not fit there is lost too.
    """

    name: str
    what: str
    bits_per_s: float
    round_trip: float
    loss: float = 0.0

    @property
    def queue_bytes(self) -> int:
        """Room for what passes in two round trips: a router's buffer has one or more."""
        seconds = max(2 * self.round_trip, LEAST_QUEUE_SECONDS)
        return max(LEAST_QUEUE_BYTES, int(seconds * self.bits_per_s / 8))

    @property
    def in_kernel(self) -> bool:
        """Whether it is too fast for the router in user space. The delay is then the kernel's own."""
        return self.bits_per_s > 2e9


LINKS = {
    link.name: link
    for link in (
        Link("10gbit", "10 Gbit/s, 0.1 ms", 10e9, 0.0001),
        Link("1gbit", "1 Gbit/s, 1 ms", 1e9, 0.001),
        Link("100mbit", "100 Mbit/s, 20 ms", 100e6, 0.020),
        Link("20mbit", "20 Mbit/s, 80 ms", 20e6, 0.080),
        Link("20mbit-loss", "20 Mbit/s, 80 ms, 0.1 % lost", 20e6, 0.080, 0.001),
    )
}
