"""The messages between the members of a gang and its coordinator, and the gang's constants.

Messages leave out fields that have their default (messages/codec.py), and what the other side has: it is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

Key = tuple[str, int]  # a role and an ordinal in it
# a role and ranges of ordinals in it: ("observer", ((0, 2), (5, 5))) is observer_0 to 2, and 5
Ranges = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
WorkerState = Literal["none", "loading", "ready", "joining", "running", "draining", "leaving", "ended"]
Failure = Literal["failed", "crashed", "stuck"]
Outcome = Failure | Literal["", "finished", "drained", "killed", "refused", "lost", "silent", "stopped"]
# why a generation ended, or an elastic rank was lost
Cause = Outcome | Literal["left", "restarted", "unreachable", "replaced"]
GangState = Literal["gathering", "running", "draining", "stopping", "finished", "failed"]
DirectiveKind = Literal["run", "load", "detach", "stop", "leave", "finished", "failed"]
EffectKind = Literal["begin", "join", "done", "failed"]
ActionKind = Literal["end", "start", "load", "attach", "detach", "update"]
EventKind = Literal[
    "waiting",
    "generation",
    "joined",
    "draining",
    "drain given up",
    "stopped",
    "lost",
    "given up",
    "recovered",
    "finished",
    "failed",
]

ATTACHED: tuple[WorkerState, ...] = (
    "joining",
    "running",
    "draining",
    "leaving",
)  # part of a generation, or becomes one
MET: tuple[WorkerState, ...] = ("running", "draining")  # part of a generation, and its peers can call it
DETACHED: tuple[WorkerState, ...] = ("loading", "ready")  # alive, and part of none
ALIVE: tuple[WorkerState, ...] = DETACHED + ATTACHED  # its process exists
ACTIVE: tuple[GangState, ...] = ("running", "draining", "stopping")
OVER: tuple[GangState, ...] = ("finished", "failed")
ERRORS: tuple[Outcome, ...] = ("failed", "crashed", "stuck")  # count as failures; a worker killed from outside does not
ORDERLY: tuple[Cause, ...] = ("drained", "left")  # how a generation ends on request
DRAIN_EXEMPT_PHASES = ("compiling", "evaluating", "saving")  # a drain waits for them; earlier, nothing is to be saved
DEBUGGING = "debugging"  # the phase of a worker in which somebody debugs: no time limit of the run counts meanwhile
FENCE = 0.8  # fraction of a lease without an answer after which a member ends its worker, before rank 0 gives it up
DETACH = 0.6  # fraction of a lease after which a worker that stays leaves its generation, so that it need not end
MAX_BACKOFF_SECONDS = 300.0
OUT_OF_MEMORY = "out of memory"  # prefix of the hint at a worker's end that the kernel has counted as such
KILLED = "killed by SIGKILL"  # a worker's end; a hint follows unless the kernel's counts show that memory sufficed
JOIN_SECONDS = 0.2  # between two batches of members that join: each costs every member a message
PEER_REPORT_SECONDS = 1.0  # from a rank's loss of a peer until that peer has reported its own end


class Join(NamedTuple):
    """A member's part in a generation. `number` is 0 if the generation began with it. A member that joins later, or
    joins again after it was lost, gets the next number of the generation."""

    role: str
    ordinal: int
    number: int = 0


class LostPeer(NamedTuple):
    """A peer that rank 0's worker found dead or silent; with `replace`, one whose worker is to be replaced."""

    join: Join
    replace: bool = False


@dataclass(frozen=True)
class RoleSpec:
    """A role's name and its numbers of members, which are equal unless it is elastic.

    The workers of a role that `stays` keep their process and their object when a generation ends, but for rank 0's.
    For `restarts`, `backoff`, `required` and `max_memory_mb` see `Role`.
    """

    name: str
    count: int
    minimum: int
    maximum: int
    elastic: bool
    stays: bool = False
    restarts: int | None = None
    backoff: float | None = None
    required: bool = False
    max_memory_mb: int | None = None


@dataclass(frozen=True)
class Rules:
    """The gang's times (seconds) and bounds; most are settings of the same names."""

    lease: float = 6.0
    join_grace: float = 10.0
    rejoin_interval: float = 10.0
    rejoin_timeout: float = 600.0
    drain_timeout: float = 20.0
    max_failures: int = 3
    finish_grace: float = 30.0
    stable_after: float = 30.0  # an elastic rank that dies sooner after it joined, again and again, must wait
    phase_timeout: float = 1800.0
    max_restarts: int = 20
    progress_timeout: float = 3600.0
    longest_pause: float = 60.0  # between two generations without progress
    steps: bool = True  # whether the job reports steps; otherwise only time tells deaths in a row from rare ones
    tick: float = 0.1  # between two looks at what time has changed


@dataclass(frozen=True)
class SharedSettings:
    """The settings that every rank must share: `values` by variable, and their `digest`. Empty: nothing is compared."""

    digest: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """What has been spent without progress; it outlives rank 0's process.

    `step` is the newest step, `start` that of the newest checkpoint from which a generation started. `fruitless` counts
    the generations that ended since, `seen` each kind of end; `seconds` passed from the first of them to the last.
    """

    step: int = 0
    start: int = 0
    fruitless: int = 0
    seconds: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Why the job failed, and its exit code. A `final` verdict is kept on disk, and holds until something changes."""

    reason: str
    code: int
    final: bool = True


class WorkerStatus(Struct, frozen=True, omit_defaults=True):
    """A member's newest worker, and how it ended.

    `state` is one of those that life/ has a table of. `generation` and `join` are those that it is, or was, a part of,
    or loads for. The `outcome` of one that is ready is `lost` if it could not meet the others.

    | outcome | meaning |
    | --- | --- |
    | finished, drained | as rank 0's worker reports |
    | failed, crashed, stuck | it raised; a signal of its own making; a step or a phase took too long |
    | killed, stopped, silent | from outside; by a directive or by fencing; no heartbeat for a lease |
    | refused, lost | bad input; a peer is gone |

    `lost_peers` are those that rank 0's worker gave up; in a heartbeat, those that the
    coordinator has not taken. `phase` is loading, saving ..., or empty.
    """

    generation: int = 0
    state: WorkerState = "none"
    outcome: Outcome = ""
    error: str = ""
    step: int = 0
    summary: dict[str, Any] = msgspec.field(default_factory=dict)
    drains_failed: int = 0
    lost_peers: tuple[LostPeer, ...] = ()
    phase: str = ""
    join: int = 0


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """A member's state. `role` and `ordinal` are empty if the gang assigns the place.

    `sequence` grows with every heartbeat of an incarnation. `epoch` is that of the last directive that the member
    carried out. `acknowledged`: it knows how the job ended. `job` names the job and the version of its file. `settings`
    are the shared settings behind `digest`, until the coordinator has answered: it names the difference. `copied` is
    the newest generation that the rank's disk knew of, with copies of checkpoints, as it was started.
    """

    role: str
    ordinal: int | None
    incarnation: str
    sequence: int
    node: str = ""
    epoch: int = 0
    worker: WorkerStatus = msgspec.field(default_factory=WorkerStatus)
    leaving: bool = False
    acknowledged: bool = False
    job: str = ""
    digest: str = ""
    settings: dict[str, Any] | None = None
    copied: int = 0


class Directive(Struct, frozen=True, omit_defaults=True):
    """What a member must do: run a worker as a part of `generation`; load one for it, to join later; detach its worker
    from any generation, and keep it; stop it; leave, or exit since the job is over.

    `role` and `ordinal` are the member's place, `join` the number of its part in the generation. `members` are all that
    the generation has had, in order of rank; `lost` those that it goes on without; `joined` those that joined later and
    are not lost. A worker that `stays` is detached, not ended, if rank 0 is silent. `drain` asks rank 0's worker for a
    checkpoint. `busy` tells a member that is leaving not to give up the drain: rank 0's worker is in a phase. `paused`:
    a member is debugged, and no time limit of the run counts. `final`: the job stays failed when it is started again.
    `begun` is the generation that began last, for a member that has no part in it.
    """

    kind: DirectiveKind
    ordinal: int
    epoch: int
    generation: int = 0
    members: tuple[Key, ...] = ()
    lost: tuple[Key, ...] = ()
    drain: bool = False
    reason: str = ""
    code: int = 0
    role: str = ""
    final: bool = False
    busy: bool = False
    paused: bool = False
    join: int = 0
    joined: tuple[Join, ...] = ()
    stays: bool = False
    listed: int = 0  # how many members the list has
    begun: int = 0  # as it was when this directive was given

    @property
    def content(self) -> tuple[object, ...]:
        """What it says, without the epoch and the place. The members follow from the generation and those that joined
        or were lost."""
        part = self.generation, self.join, self.stays, self.lost, self.joined
        return self.kind, *part, self.drain, self.busy, self.paused, self.reason, self.code, self.final


class Beat(Struct, frozen=True, omit_defaults=True):
    """A member's request: its heartbeat, if that has changed, and what it has.

    `since` is the `sequence` of the heartbeat that still holds, if `heartbeat` is left out. `known` names the newest
    directive (`name_of_directive`); empty asks for an answer at once. `listed` names the newest list of members.
    """

    incarnation: str
    sequence: int
    since: int = 0
    heartbeat: Heartbeat | None = None
    known: str = ""
    listed: str = ""


class Query(Struct, frozen=True, omit_defaults=True):
    """A question to a member's supervisor, which replies within `timeout` seconds, by the query's `number`."""

    number: str
    what: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: float = 5.0


class Answer(Struct, frozen=True, omit_defaults=True):
    """The answer of the coordinator of that incarnation: a directive, or nothing if the one that was named holds.

    The directive's own `members` and `lost` are empty: they travel as ranges, `members` only if the beat did not name
    the list. `again` asks for the whole heartbeat, which this coordinator does not have; such a beat renews no lease.
    """

    coordinator: str = ""
    directive: Directive | None = None
    members: Ranges | None = None
    lost: Ranges = ()
    again: bool = False
    queries: tuple[Query, ...] = ()


@dataclass(frozen=True)
class Effect:
    """What must be on disk before the gang goes on: the `members` that `begin` a generation, or that it has with those
    that `join` it; or the job is `done`, or has `failed` for good, as `verdict` says."""

    kind: EffectKind
    generation: int = 0
    members: tuple[Key, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Event:
    """What happened to the gang, for logs, metrics and history."""

    kind: EventKind
    cause: Cause = ""
    reason: str = ""
    number: int = 0  # of a generation that begins
    members: str = ""
    stayed: int = 0  # members of a generation that begins whose workers lived before it
    seconds: float = 0.0  # of a recovery, or of the slowest join
    joins: tuple[float, ...] = ()  # of each member that joined: seconds from its directive to load until it is in
    summary: dict[str, Any] = field(default_factory=dict)

    def details(self) -> dict[str, Any]:
        """The fields that say something, for a log line."""
        return {name: value for name, value in vars(self).items() if value and name not in ("kind", "summary", "joins")}


class RejectedError(Exception):
    """A heartbeat is refused. `reason` is a short label; the text says what to do."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Reply:
    """The answer to the request `number`, of the member `key`; or its refusal."""

    number: int
    answer: Answer | RejectedError
    key: Key | None = None


@dataclass(frozen=True)
class Batch:
    """What a coordinator is to do now: to answer requests, to put an effect on disk, to report events; and when `tick`
    is due. `settled`: the job is over, and rank 0 need not stay for others."""

    replies: tuple[Reply, ...]
    effect: Effect | None
    events: tuple[Event, ...]
    deadline: float
    settled: bool = False


def name_of(key: Key) -> str:
    """`observer_1` for ("observer", 1)."""
    return f"{key[0]}_{key[1]}"


def end_of(key: Key, worker: WorkerStatus) -> str:
    """How a worker ended, in words."""
    known = worker.error.splitlines()[0] if worker.error and worker.outcome in ("killed", "crashed", "stuck") else ""
    return f"worker of {name_of(key)} {known or worker.outcome}"
