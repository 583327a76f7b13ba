"""Where the ranks of a host go that stays away: what `rolecall run --hosts` decides, by who is where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """A rank's host, and how many GPUs it has there."""

    host: str
    gpus: int = 0


class Room:
    """The hosts of a run: which of them are away, and since when. After `timeout` seconds their ranks go to others."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.gpus = dict[str, int]()  # that each host has
        self._lost = dict[str, float]()  # since when each is away

    def lost(self, host: str, now: float) -> None:
        """The connection to `host` has ended."""
        self._lost[host] = now

    def back(self, host: str, now: float) -> None:
        """`host` is connected again. If all were away, this machine was: the others' time begins anew."""
        if len(self._lost) == len(self.gpus):
            self._lost = dict.fromkeys(self._lost, now)
        self._lost.pop(host, None)

    def left(self, host: str, now: float) -> float:
        """The seconds until the ranks of `host` may go to another one."""
        return max(0.0, self._lost.get(host, now) + self.timeout - now)

    def others(self, seat: Seat, seats: Iterable[Seat], among: Sequence[str]) -> tuple[list[str], str]:
        """The hosts `among` these with room for the rank of `seat`, which has to leave: first those with few of the
        ranks at `seats`, for how often they are named. If there are none, also why."""
        ranks, taken = Counter[str](), Counter[str]()
        for each in seats:
            ranks[each.host] += 1
            taken[each.host] += each.gpus
        there = [host for host in dict.fromkeys(among) if host != seat.host and host not in self._lost]
        if not there:
            return [], "no other host that it may use is connected"
        free = [host for host in there if not seat.gpus or self.gpus[host] - taken[host] >= seat.gpus]
        if not free:
            return [], f"gpus={seat.gpus} are free on none of {', '.join(there)}"
        return sorted(free, key=lambda host: (ranks[host] + 1) / among.count(host)), ""
