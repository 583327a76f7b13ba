"""Who is which member: places for the ranks that report, and refusals; the members of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolecall.gang.protocol import ALIVE, Key, RejectedError, Report, Role, name_of

REMEMBERED = 10_000


@dataclass
class Member:
    """A member's newest report, and when it was heard. `told` is the epoch of the order to have no worker."""

    report: Report
    heard_at: float
    told: int

    @property
    def idle(self) -> bool:
        """Whether it surely has no worker: it says so, and had carried out that order when it said so."""
        return self.report.state not in ALIVE and self.report.epoch >= self.told

    @property
    def leaving(self) -> bool:
        return self.report.leaving


@dataclass
class Generation:
    """The newest generation. `connected` says that its workers have met: only then can it go on without one."""

    number: int
    members: dict[Key, str]  # in order of rank, with the incarnation that is meant
    started: float
    connected: bool = False
    lost: dict[Key, str] = field(default_factory=dict)  # elastic ranks that it goes on without, and why
    drains_failed: int = 0
    drain_after: float = 0.0
    hold_until: float = 0.0

    def has(self, key: Key, member: Member | None) -> bool:
        """Whether `member`, in its present incarnation, belongs to it."""
        return member is not None and key not in self.lost and self.members.get(key) == member.report.incarnation

    def gave_up(self, key: Key, report: Report) -> bool:
        """Whether `report` is of one that rank 0's worker gave up, maybe before its supervisor told how it ended."""
        return self.lost.get(key) == "unreachable" and self.members.get(key) == report.incarnation


class Roster:
    """Gives each report its place. `incarnation` is rank 0's own: nobody else can be rank 0."""

    def __init__(self, roles: Mapping[str, Role], master: Key, incarnation: str) -> None:
        self._roles, self._master, self._incarnation = roles, master, incarnation
        self._newest: dict[object, str] = {}  # the incarnation of each rank, silent ones too
        self._retired: dict[str, None] = {}

    def place(self, report: Report, members: Mapping[Key, Member]) -> Key:
        """The key of the member that reports. Raises RejectedError."""
        role = self._roles.get(report.role)
        if role is None:
            raise RejectedError("role", f"no role {report.role!r} in this job")
        if report.incarnation in self._retired:
            raise RejectedError(
                "superseded", f"another process took the place of this {role.name}; give each an ORDINAL"
            )
        ordinal = report.ordinal
        if ordinal is None:
            ordinal = self._assign(role, report, members)
        if not 0 <= ordinal < role.maximum:
            raise RejectedError("ordinal", f"{role.name} has ordinals 0 to {role.maximum - 1}, not {ordinal}")
        if (role.name, ordinal) == self._master and report.incarnation != self._incarnation:
            raise RejectedError("master", f"{name_of(self._master)} is running already, at the address that was called")
        key = role.name, ordinal
        self._retire_older(key, report)
        return key

    def _assign(self, role: Role, report: Report, members: Mapping[Key, Member]) -> int:
        taken = {key[1]: member.report for key, member in members.items() if key[0] == role.name}
        for ordinal, holder in taken.items():
            mine = holder.incarnation == report.incarnation
            if mine or (holder.ordinal is None and same_node(holder, report)):
                return ordinal
        free = (n for n in range(role.maximum) if n not in taken and (role.name, n) != self._master)
        found = next(free, None)
        if found is None:
            raise RejectedError("full", f"all {role.maximum} places for {role.name} are taken")
        return found

    def _retire_older(self, key: Key, report: Report) -> None:
        """Late reports of an incarnation that was replaced are refused. What makes a rank the same is an ordinal of
        its own, or its node; who lost an assigned place to another node's rank is given another if it comes back."""
        rank: object = key if report.ordinal is not None else (key[0], report.node or report.incarnation)
        before = self._newest.get(rank)
        if before and before != report.incarnation:
            self._retired[before] = None
        self._newest[rank] = report.incarnation
        if len(self._retired) > REMEMBERED:
            del self._retired[next(iter(self._retired))]


def same_node(one: Report, other: Report) -> bool:
    return bool(one.node) and one.node == other.node
