"""A gang on a clock of the test's own, with members that do what the test asks for."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from rolecall.gang.gang import Gang
from rolecall.gang.protocol import (
    ALIVE,
    ATTACHED,
    OVER,
    Answer,
    Batch,
    Beat,
    Directive,
    Effect,
    Event,
    Heartbeat,
    Key,
    RejectedError,
    RoleSpec,
    Rules,
    WorkerStatus,
)

RL = (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 2, 1, 4, True))
PS = (RoleSpec("ps", 1, 1, 1, False), RoleSpec("trainer", 2, 2, 2, False))
RULES = Rules(max_restarts=100, longest_pause=0.0)  # the restart budget has scripts of its own
FIRST = "first"  # rank 0's incarnation
WORKER_FIELDS = set(WorkerStatus.__struct_fields__)


def changed(heartbeat: Heartbeat, **changes: Any) -> Heartbeat:
    """`heartbeat` with `changes`, of its own fields and of its worker's."""
    worker = {name: changes.pop(name) for name in list(changes) if name in WORKER_FIELDS}
    return replace(heartbeat, worker=replace(heartbeat.worker, **worker), **changes)


class FakeMember:
    """A member that sends the heartbeats and carries out the directives that a test asks for."""

    def __init__(self, play: Play, heartbeat: Heartbeat) -> None:
        self.play, self.heartbeat = play, heartbeat
        self.key: Key = (heartbeat.role, -1)

    def sends(self, **changes: Any) -> None:
        """Send a heartbeat, with `changes` from now on."""
        self.heartbeat = changed(self.heartbeat, **{"sequence": self.heartbeat.sequence + 1, **changes})
        self.key = self.play.receive(self.heartbeat)

    @property
    def directive(self) -> Directive:
        return self.play.gang.directive(self.key)

    def obeys(self) -> None:
        """Carry out the directive, and report that. A worker meets the others, or has loaded, at once; one that the
        test lets load goes on with that."""
        directive, worker = self.directive, self.heartbeat.worker
        part = {"generation": directive.generation, "join": directive.join}
        same = (worker.generation, worker.join) == (directive.generation, directive.join) and worker.state != "none"
        idle = worker.state in ALIVE and worker.state not in ATTACHED
        changes: dict[str, Any] = {}
        match directive.kind:
            case "run" if not same or (idle and not worker.outcome):
                changes = {**part, "state": "running", "outcome": "", "error": "", "step": 0, "lost_peers": ()}
            case "load" if not same or worker.state in ATTACHED:
                state = worker.state if idle else "ready"
                changes = {**part, "state": state, "outcome": "", "error": "", "step": 0}
            case "detach" if worker.state in ATTACHED:
                changes = {"state": "ready", "outcome": "stopped"}
            case "stop" | "leave" | "finished" | "failed" if worker.state in ALIVE:
                changes = {"state": "ended", "outcome": "stopped"}
        self.sends(epoch=directive.epoch, acknowledged=directive.kind in OVER, **changes)

    def ends(self, outcome: str, **changes: Any) -> None:
        """Its worker ends."""
        self.sends(state="ended", outcome=outcome, **changes)


class Play:
    """A gang, its members, and the clock."""

    def __init__(self, roles: tuple[RoleSpec, ...] = RL, rules: Rules = RULES, **persisted: Any) -> None:
        self.now = 0.0
        self.gang = Gang(roles, rules, FIRST, self.now, **persisted)
        self.members: list[FakeMember] = []
        self.joined = 0
        self.disk: Literal["takes", "refuses", "hangs"] = "takes"
        self.effects: list[Effect] = []
        self.events: list[Event] = []
        self.replies: dict[int, Answer] = {}
        self.requests = 0
        self.settled = False

    def join(self, role: str, ordinal: int | None = 0, incarnation: str = "", **changes: Any) -> FakeMember:
        """A new member, which sends its first heartbeat."""
        self.joined += 1
        incarnation = incarnation or (FIRST if role == self.gang.rank0[0] else f"{role}-{self.joined}")
        heartbeat = Heartbeat(role, ordinal, incarnation, 0, node=f"node-of-{role}-{ordinal}")
        member = FakeMember(self, changed(heartbeat, **changes))
        member.sends()
        self.members.append(member)
        return member

    def leaves(self, member: FakeMember) -> None:
        """It sends nothing more."""
        self.members.remove(member)

    def receive(self, heartbeat: Heartbeat) -> Key:
        """The gang receives a heartbeat. Returns its member; raises RejectedError."""
        self.request(Beat(heartbeat.incarnation, heartbeat.sequence, heartbeat=heartbeat))
        members = self.gang.members.items()
        return next(key for key, each in members if each.heartbeat.incarnation == heartbeat.incarnation)

    def request(self, beat: Beat) -> int:
        """The number of a request to the gang, whose answer will be in `replies`. Raises RejectedError."""
        self.requests += 1
        self.take(self.gang.receive(self.requests, beat, self.now))
        return self.requests

    def take(self, batch: Batch) -> Batch:
        """What the gang says."""
        self.events += batch.events
        self.effects += [batch.effect] if batch.effect else []
        for reply in batch.replies:
            if isinstance(reply.answer, RejectedError):
                raise reply.answer
            self.replies[reply.number] = reply.answer
        return batch

    def tick(self) -> None:
        while (batch := self.take(self.gang.tick(self.now))).effect:
            if self.disk != "hangs":
                self.take(self.gang.written(self.disk == "takes", self.now))
            if self.disk != "takes":
                break
        self.settled = batch.settled

    def settle(self) -> None:
        """Everyone carries out its directives until they stay the same."""
        before = None
        while before != (now := (self.gang.state, [member.directive for member in self.members])):
            before = now
            for member in list(self.members):
                member.obeys()
            self.tick()

    def wait(self, seconds: float, *silent: FakeMember) -> None:
        """Let time pass; everyone but `silent` sends heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            for member in self.members:
                if member not in silent:
                    member.sends()
            self.tick()

    def sleep(self, seconds: float) -> None:
        """The coordinator is stopped (SIGSTOP) for so long."""
        self.now += seconds
        self.tick()

    @property
    def running(self) -> list[Key]:
        """The members that are to run."""
        return [member.key for member in self.members if member.directive.kind == "run"]

    def causes(self, kind: str) -> list[str]:
        return [event.cause for event in self.events if event.kind == kind]


def trains(roles: tuple[RoleSpec, ...] = RL, rules: Rules = RULES, step: int = 1) -> tuple[Play, list[FakeMember]]:
    """A gang in its first generation, after `step`."""
    play = Play(roles, rules)
    members = [play.join(role.name, ordinal) for role in roles for ordinal in range(role.count)]
    play.settle()
    assert play.gang.state == "running"
    members[0].sends(step=step)
    play.tick()
    return play, members
