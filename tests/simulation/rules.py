"""The simulation's constants: times, the gang's rules, the jobs, and the safeguards that can be left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rolecall.gang.member import TICKS
from rolecall.gang.protocol import RoleSpec, Rules

LEASE = 6.0
WATCH = LEASE / TICKS  # how often a supervisor looks
STOP = 0.1  # a worker is gone so soon after a SIGKILL
AWAKE = WATCH + STOP
ORPHAN = 0.3
PATIENCE = 1.0  # a worker that has not left its generation within it is killed
LOADING = (0.05, 0.5, 4.0)  # how long a worker may load
STEP = 0.4
HANGING = 0.1  # how often a hanging write is looked at
CONNECT_TIMEOUT = 30.0
CALL_TIMEOUT = 5.0
NAP = LEASE / 3  # the coordinator does not notice a shorter pause of its own
SETTLE = 30.0
RULES = Rules(
    lease=LEASE,
    join_grace=5.0,
    rejoin_interval=4.0,
    rejoin_timeout=100.0,
    drain_timeout=8.0,
    max_failures=3,
    finish_grace=10.0,
    stable_after=8.0,
    max_restarts=40,
    progress_timeout=1000.0,
    longest_pause=4.0,
    tick=0.25,
)
JOBS = (
    (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 2, 1, 4, True)),
    (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 3, 2, 5, True)),
    (RoleSpec("agent", 1, 1, 1, False), RoleSpec("trainer", 1, 1, 1, False), RoleSpec("observer", 2, 1, 3, True)),
    (RoleSpec("ps", 1, 1, 1, False), RoleSpec("trainer", 2, 2, 2, False)),
    (RoleSpec("master", 1, 1, 1, False), RoleSpec("ps", 1, 1, 1, False), RoleSpec("trainer", 2, 2, 2, False)),
)


def with_stays(roles: tuple[RoleSpec, ...]) -> tuple[RoleSpec, ...]:
    """The roles, of which those that may stay do: the elastic ones, and `ps`."""
    return tuple(replace(role, stays=role.elastic or role.name == "ps", backoff=1.0) for role in roles)


def enlarged(roles: tuple[RoleSpec, ...], ranks: int) -> tuple[RoleSpec, ...]:
    """The job with so many ranks in all, where that is more: its last role has the others, and a few places to spare
    where it is elastic."""
    *others, last = roles
    count = ranks - sum(role.count for role in others)
    if count <= last.count:
        return roles
    minimum, maximum = last.minimum if last.elastic else count, count + last.maximum - last.count
    return (*others, replace(last, count=count, minimum=minimum, maximum=maximum))


@dataclass(frozen=True)
class Safeguards:
    """What keeps the promises around gang and members, each to be left out to see that it is needed."""

    coordinator_lock: bool = True  # one coordinator a directory
    writer_lock: bool = True  # one process that writes checkpoints; the next one waits for its end
    write_fence: bool = True  # a writer looks at the newest generation's number first
    prefix: bool = True  # the rendezvous store's keys carry the generation's number
    orphans_end: bool = True  # a worker ends when its supervisor's pipe closes
    locked_out: str = "lost"  # how a worker ends that waited a lease for the writer's lock


SAFE = Safeguards()
