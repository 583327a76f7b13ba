"""Who may be which member: places for the ranks that report, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.protocol import Key, RejectedError, Report, Role, name_of


@dataclass
class Member:
    """A member's newest report, and when it was heard."""

    report: Report
    heard_at: float


class Roster:
    """Gives each report its place. `incarnation` is rank 0's own: nobody else can be rank 0."""

    def __init__(self, roles: Mapping[str, Role], master: Key, incarnation: str) -> None:
        self._roles, self._master, self._incarnation = roles, master, incarnation
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
        return role.name, ordinal

    def _assign(self, role: Role, report: Report, members: Mapping[Key, Member]) -> int:
        taken = {key[1]: member.report for key, member in members.items() if key[0] == role.name}
        for ordinal, holder in taken.items():
            same_node = report.node and holder.node == report.node and holder.ordinal is None
            if holder.incarnation == report.incarnation or same_node:
                return ordinal
        free = (ordinal for ordinal in range(role.maximum) if ordinal not in taken)
        found = next(free, None)
        if found is None:
            raise RejectedError("full", f"all {role.maximum} places for {role.name} are taken")
        return found

    def retire(self, incarnation: str) -> None:
        """`incarnation` was replaced; late reports of it are refused."""
        self._retired[incarnation] = None
        if len(self._retired) > 10_000:
            del self._retired[next(iter(self._retired))]
