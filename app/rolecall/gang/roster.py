"""The roster: which rank has which place, and which ranks are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.gang.protocol import (
    ATTACHED,
    DEBUGGING,
    Beat,
    Directive,
    Heartbeat,
    Key,
    RejectedError,
    RoleSpec,
    SharedSettings,
    name_of,
)

MAX_NAMED_SETTINGS = 3
MAX_VALUE_CHARACTERS = 80
MAX_REMEMBERED = 4096  # ranks that are not there any more: one that wakes up later may take its place again


@dataclass
class MemberRecord:
    """A member: its newest whole heartbeat, and when it was last heard from.

    `stop_epoch` is the epoch of its newest directive to stop, `sequence` that of its newest beat. `directive` is what
    it must do, as of `revision`.
    """

    heartbeat: Heartbeat
    received_at: float
    stop_epoch: int
    sequence: int
    directive: Directive | None = None
    revision: int = -1
    ends: bool = False  # its worker is to end, also if its role stays

    @property
    def idle(self) -> bool:
        """Whether it is proved to have no worker in a generation, by a heartbeat sent after it carried out the
        directive to stop or detach it."""
        return self.heartbeat.worker.state not in ATTACHED and self.heartbeat.epoch >= self.stop_epoch

    @property
    def leaving(self) -> bool:
        """Whether it asked to leave."""
        return self.heartbeat.leaving


Members = Mapping[Key, MemberRecord]


class Roster:
    """Gives each rank its place. `incarnation` is rank 0's: no other process can be rank 0. `settings` are rank 0's,
    which each rank must share. An empty `job` is any job."""

    def __init__(
        self, roles: Mapping[str, RoleSpec], rank0: Key, incarnation: str, job: str, settings: SharedSettings
    ) -> None:
        self._roles, self._rank0, self._incarnation = roles, rank0, incarnation
        self._job, self._settings = job, settings
        self._newest: dict[object, str] = {}  # the incarnation of each rank, silent ones too
        self._retired: dict[str, None] = {}  # incarnations that were replaced
        self._places: dict[object, Key] = {}  # the place of an incarnation, and of a role's rank on a node
        self._free = dict.fromkeys(roles, 0)  # by role: all ordinals below are taken
        self.leavers, self.debugged = set[Key](), set[Key]()  # members that asked to leave; whose workers are debugged

    def place(self, heartbeat: Heartbeat, members: Members, newest: int | None = None) -> Key:
        """The key of the member that sent `heartbeat`, which may know no later generation than the `newest`, if one
        runs. Raises RejectedError."""
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
        if key == self._rank0 and heartbeat.incarnation != self._incarnation:
            raise RejectedError("rank0", f"{name_of(self._rank0)} is running already, at the address that was called")
        if newest is not None and heartbeat.copied > newest:
            raise RejectedError(
                "copies",
                f"{heartbeat.node} has copies of checkpoints of generation {heartbeat.copied}, and rank 0 runs "
                f"generation {newest}, which knows nothing of them; end this run and start it with all ranks to go on "
                "from the copies, or delete CHECKPOINT_DIR/copies there",
            )
        if self._settings.digest and heartbeat.digest != self._settings.digest:
            raise RejectedError("settings", self._difference(heartbeat))
        self._retire_older(key, heartbeat)
        return key

    def renewed(self, beat: Beat, members: Members) -> Key | None:
        """The member whose newest heartbeat `beat` renews; None if it is not there."""
        key = self._places.get(beat.incarnation)  # the last place of that incarnation; another may have it by now
        member = members.get(key) if key else None
        if member is None:
            return None
        held = member.heartbeat.incarnation, member.heartbeat.sequence
        return key if held == (beat.incarnation, beat.since) else None

    def note(self, key: Key, heartbeat: Heartbeat) -> bool:
        """What the member `key` says of itself. Returns whether that is the first, or the last, that is debugged."""
        was_debugged = bool(self.debugged)
        for keys, holds in (
            (self.leavers, heartbeat.leaving),
            (self.debugged, heartbeat.worker.phase == DEBUGGING),
        ):
            if holds:
                keys.add(key)
            else:
                keys.discard(key)
        return was_debugged != bool(self.debugged)

    def vacate(self, key: Key, heartbeat: Heartbeat) -> None:
        """The place `key` is free, of the rank that sent `heartbeat`."""
        self.leavers.discard(key)
        self.debugged.discard(key)
        self._free[key[0]] = min(self._free[key[0]], key[1])
        for rank in (heartbeat.incarnation, (heartbeat.role, heartbeat.node)):
            if self._places.get(rank) == key:
                del self._places[rank]

    def _difference(self, heartbeat: Heartbeat) -> str:
        """How the settings of the rank that sent `heartbeat` differ from rank 0's."""
        key = (heartbeat.role, heartbeat.ordinal)
        who = name_of((key[0], key[1])) if key[1] is not None else f"{heartbeat.role or 'a rank'} on {heartbeat.node}"
        ours, theirs = self._settings.values, heartbeat.settings
        advice = "; give every rank the same settings, and start it again"
        names = [name for name in sorted({*ours, *(theirs or ours)}) if ours.get(name) != (theirs or ours).get(name)]
        if theirs is None or not names:
            return f"{who} has other settings than rank 0{advice}"
        hidden = len(names) - MAX_NAMED_SETTINGS
        more = f" and {hidden} more" if hidden > 0 else ""
        shown = names[:MAX_NAMED_SETTINGS]
        return f"{who} has {_listed(theirs, shown)}{more}, rank 0 has {_listed(ours, shown)}{advice}"

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
        for limits in ([role.count for role in roles], [role.maximum for role in roles]):
            for role, limit in zip(roles, limits, strict=True):
                if (ordinal := self._first_free(role.name, limit, members)) < limit:
                    return role.name, ordinal
        places, name = sum(role.maximum for role in roles), heartbeat.role or "ranks"
        raise RejectedError("full", f"all {places} places for {name} are taken")

    def _first_free(self, role: str, limit: int, members: Members) -> int:
        ordinal = self._free[role]
        while ordinal < limit and ((role, ordinal) in members or (role, ordinal) == self._rank0):
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
        self._newest.pop(rank, None)  # the one that was heard of last comes last
        self._newest[rank] = heartbeat.incarnation
        if len(self._newest) > MAX_REMEMBERED:
            del self._newest[next(iter(self._newest))]
        if len(self._retired) > MAX_REMEMBERED:
            del self._retired[next(iter(self._retired))]
        self._places[heartbeat.incarnation] = key
        if heartbeat.ordinal is None:
            self._places[heartbeat.role, heartbeat.node] = key


def same_node(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether both come from the same node, as far as they say."""
    return bool(one.node) and one.node == other.node


def _listed(values: Mapping[str, object], names: list[str]) -> str:
    """Settings by name, such as "LR=0.1, SEED=nothing"."""
    texts = {name: "nothing" if values.get(name) is None else str(values[name]) for name in names}
    return ", ".join(f"{name[:MAX_VALUE_CHARACTERS]}={text[:MAX_VALUE_CHARACTERS]}" for name, text in texts.items())
