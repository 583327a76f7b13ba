"""What the members of a gang and its coordinator send each other, and the gang's constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Key = tuple[str, int]  # a role and an ordinal in it
Ranges = tuple[tuple[str, str], ...]  # a role and ordinals in it, as in ("observer", "0-2,5")
WorkerState = Literal["none", "starting", "running", "ended"]
Outcome = Literal["", "finished", "drained", "failed", "crashed", "stuck", "killed", "refused", "lost", "silent",
                  "stopped"]  # fmt: skip
Cause = Outcome | Literal["left", "restarted", "unreachable"]  # why a generation ended, or an elastic rank was lost
GangState = Literal["gathering", "running", "draining", "stopping", "finished", "failed"]
DirectiveKind = Literal["run", "stop", "leave", "finished", "failed"]
EffectKind = Literal["begin", "done", "failed"]
ActionKind = Literal["end", "start", "update"]
EventKind = Literal["generation", "draining", "drain given up", "stopped", "lost", "recovered", "finished", "failed"]
Event = tuple[EventKind, dict[str, Any]]

ALIVE: tuple[WorkerState, ...] = ("starting", "running")
ACTIVE: tuple[GangState, ...] = ("running", "draining", "stopping")
OVER: tuple[GangState, ...] = ("finished", "failed")
ERRORS: tuple[Outcome, ...] = ("failed", "crashed", "stuck")  # count as failures; a worker killed from outside does not
ORDERLY: tuple[Cause, ...] = ("drained", "left")  # how a generation ends on request
# exit codes
AWAITED = ("compiling", "evaluating", "saving")  # phases that a drain waits for; before them there is nothing to save
FENCE = 0.8  # fraction of a lease without an answer after which a member ends its worker, before rank 0 gives it up
MAX_BACKOFF = 300.0  # seconds
OUT_OF_MEMORY = "out of memory"  # how the hint begins that says so of a worker's end, once the kernel has counted it
HOLD = 1.0  # seconds from one rank's loss of a peer until the gang knows how that peer ended
RPC_THREADS = 16  # of a worker: they serve incoming calls, and receive the answers of its outgoing ones


@dataclass(frozen=True)
class RoleSpec:
    """A role's name and how many members it has; all three numbers are equal where it is not elastic."""

    name: str
    count: int
    minimum: int
    maximum: int
    elastic: bool


@dataclass(frozen=True)
class Rules:
    """The gang's times (seconds) and bounds; see the settings of the same names."""

    lease: float = 6.0
    join_grace: float = 10.0
    rejoin_interval: float = 10.0
    rejoin_timeout: float = 600.0
    drain_timeout: float = 20.0
    max_failures: int = 3
    finish_grace: float = 30.0
    young: float = 30.0
    phase_timeout: float = 1800.0
    max_restarts: int = 20
    progress_timeout: float = 3600.0
    longest_pause: float = 60.0  # between two generations without progress
    steps: bool = True  # whether the job reports steps; otherwise only time tells deaths in a row from rare ones


@dataclass(frozen=True)
class Agreement:
    """The settings that every rank must share: `values` by variable, and their `digest`. Empty: nothing is compared."""

    digest: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """What has been spent without progress, as it outlives rank 0's process.

    `step` is the newest that was made, `start` that of the newest checkpoint that a generation started from;
    `fruitless` counts the generations that ended since, `seconds` is from the first of those ends to the last, `seen`
    how often each was seen.
    """

    step: int = 0
    start: int = 0
    fruitless: int = 0
    seconds: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Why the job failed, and its exit code. `final`: it is kept on disk, and holds until something is changed."""

    reason: str
    code: int
    final: bool = True


@dataclass(frozen=True)
class WorkerStatus:
    """A member's newest worker.

    `outcome` is how it ended: finished, drained, failed (raised), crashed (a signal of its own making), stuck (a step
    or a phase took too long), killed (from outside), refused (bad input), lost (without its peers), silent (no
    heartbeat for a lease), stopped (by a directive or by fencing). `lost_peers` are the peers that rank 0's worker
    found dead or silent; `phase` is the one that it is in (loading, saving ...), if any.
    """

    generation: int = 0
    state: WorkerState = "none"
    outcome: Outcome = ""
    error: str = ""
    step: int = 0
    summary: dict[str, Any] = field(default_factory=dict)
    drains_failed: int = 0
    lost_peers: tuple[Key, ...] = ()
    phase: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """A member's state, as it sends it to the coordinator.

    `role` is empty where the gang assigns one; `sequence` grows with every heartbeat of an incarnation; `epoch` is that
    of the last directive the member carried out; `acknowledged` says that it knows how the job ended; `job` names the
    job and the version of its file; `digest` is that of the settings that ranks share, and `settings` are those
    themselves, while the coordinator has not answered: it names the difference.
    """

    role: str
    ordinal: int | None
    incarnation: str
    sequence: int
    node: str = ""
    epoch: int = 0
    worker: WorkerStatus = field(default_factory=WorkerStatus)
    leaving: bool = False
    acknowledged: bool = False
    job: str = ""
    digest: str = ""
    settings: dict[str, Any] | None = None


@dataclass(frozen=True)
class Directive:
    """What a member must do: run the worker of `generation`, stop it, leave, or exit since the job is over.

    `role` and `ordinal` are the member's place. `lost` are the members that the generation goes on without; `drain`
    asks rank 0's worker for a checkpoint; while it is in a phase, the drain is `busy` to a member that is leaving,
    which does not give it up. `final` says that the job stays failed when it is started again.
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


@dataclass(frozen=True)
class Beat:
    """What a member posts: its state where that has changed, and what it knows.

    `since` is the `sequence` of the heartbeat that still holds, where `heartbeat` is left out. `known` names the newest
    directive that the member has (`name_of_directive`), empty where it wants one at once; `listed` names the generation
    whose list of members it has (`name_of_list`).
    """

    incarnation: str
    sequence: int
    since: int = 0
    heartbeat: Heartbeat | None = None
    known: str = ""
    listed: str = ""


@dataclass(frozen=True)
class Query:
    """What a member's supervisor is asked; it replies within `timeout` seconds, by the query's `number`."""

    number: str
    what: str
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 5.0


@dataclass(frozen=True)
class Answer:
    """What the coordinator of incarnation `lead` answers: a directive, or nothing where the one that was named holds.

    The directive's own `members` and `lost` are left empty: here they travel as ranges (see gang/wire.py), the members
    only where the beat did not name their list. `again` asks for the whole heartbeat: this coordinator does not have
    the one that the beat named. Such a beat renews no lease. `queries` are put to the member beside all that.
    """

    lead: str = ""
    directive: Directive | None = None
    members: Ranges | None = None
    lost: Ranges = ()
    again: bool = False
    queries: tuple[Query, ...] = ()


@dataclass(frozen=True)
class Effect:
    """What must be on disk before the gang goes on: `begin` a generation, or the job is `done`, or has `failed` for
    good, as `verdict` says."""

    kind: EffectKind
    generation: int = 0
    members: tuple[Key, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    verdict: Verdict | None = None


class RejectedError(Exception):
    """A heartbeat that is refused; `reason` is a short label, the text says what to do."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def name_of(key: Key) -> str:
    """`observer 1` for ("observer", 1)."""
    return f"{key[0]} {key[1]}"
