"""The newest generation: its members, the ranks that it lost, and its drain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rolecall.gang.compact import pack
from rolecall.gang.protocol import Cause, Heartbeat, Key
from rolecall.gang.roster import MemberRecord


@dataclass
class Drain:
    """The time that a drain does not count: rank 0's worker is in a phase such as saving."""

    busy_since: float | None = None
    excused: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether rank 0's worker is in such a phase."""
        return self.busy_since is not None

    def set_busy(self, busy: bool, now: float) -> bool:
        """Returns whether that is a change."""
        if busy == self.busy:
            return False
        self.excused = self.excused_until(now)
        self.busy_since = now if busy else None
        return True

    def excused_until(self, now: float) -> float:
        """Seconds of phases that do not count."""
        return self.excused + (0.0 if self.busy_since is None else now - self.busy_since)


@dataclass
class Generation:
    """`members` are in order of rank, each with its incarnation. `connected`: its workers have met, so it can go on
    without an elastic rank."""

    number: int
    members: dict[Key, str]
    started: float
    connected: bool = False
    lost: dict[Key, Cause] = field(default_factory=dict)  # elastic ranks that it goes on without
    last_loss: str = ""
    drain: Drain | None = None
    drains_failed: int = 0
    drain_after: float = 0.0
    hold_until: float = 0.0
    peer_lost_at: dict[Key, float] = field(default_factory=dict)  # fixed ranks whose worker ended for a lost peer

    def __post_init__(self) -> None:
        self.keys = tuple(self.members)
        self.ranges = pack(self.keys)
        self.lost_keys: tuple[Key, ...] = ()  # sorted
        self.lost_ranges = pack(())
        self._counts = Counter(role for role, _ in self.keys)

    def lose(self, key: Key, cause: Cause, end: str) -> None:
        """The generation goes on without `key`; `end` says how that rank was lost."""
        self.lost[key], self.last_loss = cause, end
        self.lost_keys = tuple(sorted(self.lost))
        self.lost_ranges = pack(self.lost_keys)
        self._counts[key[0]] -= 1

    def count(self, role: str) -> int:
        """Members with `role` that are not lost."""
        return self._counts[role]

    def has(self, key: Key, member: MemberRecord | None) -> bool:
        """Whether `member`, in its present incarnation, belongs to the generation."""
        return member is not None and key not in self.lost and self.members.get(key) == member.heartbeat.incarnation

    def was_unreachable(self, key: Key, heartbeat: Heartbeat) -> bool:
        """Whether rank 0's worker gave this member up, maybe before its supervisor reported how its worker ended."""
        return self.lost.get(key) == "unreachable" and self.members.get(key) == heartbeat.incarnation
