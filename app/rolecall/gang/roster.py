"""Who is which member: places for the ranks that join, and refusals; the members of a generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rolecall.gang.protocol import ALIVE, Agreement, Cause, Directive, Heartbeat, Key, RejectedError, RoleSpec, name_of
from rolecall.gang.wire import pack

REMEMBERED = 10_000  # replaced incarnations
MOST_NAMED = 3  # settings that differ
MOST_VALUE = 80  # characters of one


@dataclass
class MemberRecord:
    """A member's newest heartbeat that came whole, and when it was last heard from.

    `stop_epoch` is the epoch of its newest directive to stop. `sequence` is the newest beat's. `directive` is what it
    must do, as of the gang's `revision`.
    """

    heartbeat: Heartbeat
    received_at: float
    stop_epoch: int
    sequence: int
    directive: Directive | None = None
    revision: int = -1

    @property
    def idle(self) -> bool:
        """Whether it surely has no worker: its heartbeat says so, and was sent after it carried out that directive."""
        return self.heartbeat.worker.state not in ALIVE and self.heartbeat.epoch >= self.stop_epoch

    @property
    def leaving(self) -> bool:
        """Whether it asked to leave."""
        return self.heartbeat.leaving


Members = Mapping[Key, MemberRecord]


@dataclass
class Generation:
    """The newest generation. `connected` says that its workers have met: only then can it go on without one."""

    number: int
    members: dict[Key, str]  # in order of rank, with the incarnation that is meant
    started: float
    connected: bool = False
    lost: dict[Key, Cause] = field(default_factory=dict)  # elastic ranks that it goes on without
    last_loss: str = ""  # what was seen of the newest of them
    drains_failed: int = 0
    drain_after: float = 0.0
    hold_until: float = 0.0
    bereft: dict[Key, float] = field(default_factory=dict)  # whose workers ended without a peer, and when
    busy_since: float | None = None  # rank 0's worker is in a phase, during a drain
    excused: float = 0.0  # seconds of the drain that it was in earlier ones

    def __post_init__(self) -> None:
        self.keys = tuple(self.members)
        self.ranges = pack(self.keys)
        self.lost_keys: tuple[Key, ...] = ()  # sorted
        self.lost_ranges = pack(())
        self._counts = Counter(role for role, _ in self.keys)

    def lose(self, key: Key, cause: Cause, what: str) -> None:
        """It goes on without `key`, of which `what` was seen."""
        self.lost[key], self.last_loss = cause, what
        self.lost_keys = tuple(sorted(self.lost))
        self.lost_ranges = pack(self.lost_keys)
        self._counts[key[0]] -= 1

    def count(self, role: str) -> int:
        """Its members with `role`, without those that it has lost."""
        return self._counts[role]

    def has(self, key: Key, member: MemberRecord | None) -> bool:
        """Whether `member`, in its present incarnation, belongs to it."""
        return member is not None and key not in self.lost and self.members.get(key) == member.heartbeat.incarnation

    def was_unreachable(self, key: Key, heartbeat: Heartbeat) -> bool:
        """Whether rank 0's worker gave this member up, maybe before its supervisor reported how its worker ended."""
        return self.lost.get(key) == "unreachable" and self.members.get(key) == heartbeat.incarnation


class Roster:
    """Gives each rank its place. `incarnation` is rank 0's: no other process can be rank 0. `agreement` are its
    settings, which each rank must share. Empty `job`: of any job."""

    def __init__(
        self, roles: Mapping[str, RoleSpec], master: Key, incarnation: str, job: str, agreement: Agreement
    ) -> None:
        self._roles, self._master, self._incarnation = roles, master, incarnation
        self._job, self._agreement = job, agreement
        self._newest: dict[object, str] = {}  # the incarnation of each rank, silent ones too
        self._retired: dict[str, None] = {}
        self._places: dict[object, Key] = {}  # the last place of an incarnation, and of a role's rank on a node
        self._free = dict.fromkeys(roles, 0)  # by role: all ordinals below are taken

    def place(self, heartbeat: Heartbeat, members: Members) -> Key:
        """The key of the member that sent `heartbeat`. Raises RejectedError."""
        if self._job and heartbeat.job != self._job:
            job = heartbeat.job or "no job"
            raise RejectedError(
                "job", f"this rank is of {job}, rank 0 of {self._job}; give every rank the same JOB and files"
            )
        if heartbeat.role not in self._roles and (heartbeat.role or heartbeat.ordinal is not None):
            raise RejectedError("role", f"no role {heartbeat.role!r} in this job")
        if heartbeat.incarnation in self._retired:
            which = heartbeat.role or "rank"
            raise RejectedError("superseded", f"another process took the place of this {which}; give each an ORDINAL")
        key = self._assign(heartbeat, members) if heartbeat.ordinal is None else (heartbeat.role, heartbeat.ordinal)
        role = self._roles[key[0]]
        if not 0 <= key[1] < role.maximum:
            raise RejectedError("ordinal", f"{role.name} has ordinals 0 to {role.maximum - 1}, not {key[1]}")
        if key == self._master and heartbeat.incarnation != self._incarnation:
            raise RejectedError("master", f"{name_of(self._master)} is running already, at the address that was called")
        if self._agreement.digest and heartbeat.digest != self._agreement.digest:
            raise RejectedError("settings", self._difference(heartbeat))
        self._retire_older(key, heartbeat)
        return key

    def place_of(self, incarnation: str) -> Key | None:
        """The last place of `incarnation`; another may have it by now."""
        return self._places.get(incarnation)

    def vacate(self, key: Key) -> None:
        """The place `key` is free."""
        self._free[key[0]] = min(self._free[key[0]], key[1])

    def _difference(self, heartbeat: Heartbeat) -> str:
        """How the settings of the rank that sent `heartbeat` differ from rank 0's."""
        key = (heartbeat.role, heartbeat.ordinal)
        who = name_of((key[0], key[1])) if key[1] is not None else f"{heartbeat.role or 'a rank'} on {heartbeat.node}"
        ours, theirs = self._agreement.values, heartbeat.settings
        advice = "; give every rank the same settings, and start it again"
        names = [name for name in sorted({*ours, *(theirs or ours)}) if ours.get(name) != (theirs or ours).get(name)]
        if theirs is None or not names:
            return f"{who} has other settings than rank 0{advice}"
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""

        def value(values: Mapping[str, object], name: str) -> str:
            return "nothing" if values.get(name) is None else str(values[name])[:MOST_VALUE]

        def listed(values: Mapping[str, object]) -> str:
            return ", ".join(f"{name[:MOST_VALUE]}={value(values, name)}" for name in names[:MOST_NAMED])

        ours_listed = value(ours, names[0]) if len(names) == 1 else listed(ours)
        return f"{who} has {listed(theirs)}{more}, rank 0 has {ours_listed}{advice}"

    def _assign(self, heartbeat: Heartbeat, members: Members) -> Key:
        """The place of a rank without an ordinal: the one that it has, or the first that is free. Roles are filled in
        the job's order, each up to its count, then the elastic ones up to their maximum."""
        for rank in (heartbeat.incarnation, (heartbeat.role, heartbeat.node)):
            key = self._places.get(rank)
            if key is None or key not in members:
                continue
            holder = members[key].heartbeat
            assigned = holder.ordinal is None and holder.role == heartbeat.role
            if holder.incarnation == heartbeat.incarnation or (assigned and same_node(holder, heartbeat)):
                return key
        roles = [role for role in self._roles.values() if heartbeat.role in ("", role.name)]
        for most in ([role.count for role in roles], [role.maximum for role in roles]):
            for role, limit in zip(roles, most, strict=True):
                if (ordinal := self._first_free(role.name, limit, members)) < limit:
                    return role.name, ordinal
        places, name = sum(role.maximum for role in roles), heartbeat.role or "ranks"
        raise RejectedError("full", f"all {places} places for {name} are taken")

    def _first_free(self, role: str, limit: int, members: Members) -> int:
        ordinal = self._free[role]
        while ordinal < limit and ((role, ordinal) in members or (role, ordinal) == self._master):
            ordinal += 1
        self._free[role] = max(self._free[role], ordinal)
        return ordinal

    def _retire_older(self, key: Key, heartbeat: Heartbeat) -> None:
        """Late heartbeats of a replaced incarnation are refused. A rank is the same if its configured ordinal is, or
        else its node; one that lost an assigned place to another node's rank gets another place if it returns."""
        node = heartbeat.node or heartbeat.incarnation
        rank: object = key if heartbeat.ordinal is not None else (heartbeat.role, node)
        before = self._newest.get(rank)
        if before and before != heartbeat.incarnation:
            self._retired[before] = None
            self._places.pop(before, None)
        self._newest[rank] = heartbeat.incarnation
        self._places[heartbeat.incarnation] = key
        if heartbeat.ordinal is None:
            self._places[heartbeat.role, heartbeat.node] = key
        if len(self._retired) > REMEMBERED:
            del self._retired[next(iter(self._retired))]


def same_node(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether both come from the same node, as far as they say."""
    return bool(one.node) and one.node == other.node
