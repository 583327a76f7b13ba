"""The jobs by name, and the rank of a process."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from rolecall import config
from rolecall.config import Settings, UsageError
from rolecall.gang import protocol
from rolecall.job.spec import Job

JOBS = ("rl", "ps", "rnn", "hybrid", "script")


@dataclass(frozen=True)
class Identity:
    """A process's role and ordinal; `ordinal` is None where the gang assigns one."""

    role: str
    ordinal: int | None


def get(name: str) -> Job:
    """The job called `name`. Raises UsageError for an unknown name."""
    if name not in JOBS:
        raise UsageError(f"JOB={name!r}: " + ("is missing" if not name else "no such job") + f" ({', '.join(JOBS)})")
    return cast(Job, importlib.import_module(f"rolecall.jobs.{name}").JOB)


def load(name: str = "", **overrides: Any) -> tuple[Job, Settings]:
    """The job that `name`, or else JOB, names, and its settings; `overrides` (by field name) win over the environment.

    Raises UsageError for an unknown job or wrong settings.
    """
    name = name or config.job_name()
    job = get(name)
    return job, config.load(job.settings, job=name, **overrides)


def resolve(target: str) -> Callable[..., Any]:
    """Imports the function that `target`, a `module:function` of this package, names."""
    module, _, name = target.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


def roles(job: Job, settings: Settings) -> tuple[protocol.RoleSpec, ...]:
    """The job's roles with their counts filled in. Raises UsageError for counts that contradict each other."""

    def number(name: str, default: int) -> int:
        return int(getattr(settings, name.lower())) if name else default

    specs = []
    for role in job.roles:
        count = number(role.count, 1)
        low, high = number(role.minimum, count), number(role.maximum, count)
        if not low <= count <= high:
            raise UsageError(
                f"wrong settings: {role.count}={count} must lie between {role.minimum}={low} and {role.maximum}={high}"
            )
        specs.append(protocol.RoleSpec(role.name, count, low, high, role.elastic))
    return tuple(specs)


def identity(job: Job, settings: Settings, host: str) -> Identity:
    """The rank of this process, from ROLE and ORDINAL, the host name, or torch's RANK.

    A host name gives an ordinal where it is exactly <role>-<n> or ends in -<role>-<n>, as a StatefulSet's pods do.
    Raises UsageError where the role is missing or unknown, or the ordinal is out of range.
    """
    counts = roles(job, settings)
    total = sum(role.count for role in counts)
    if settings.world_size is not None and settings.world_size != total and not settings.role:
        spelled = " + ".join(f"{role.count} {role.name}" for role in counts)
        raise UsageError(f"WORLD_SIZE={settings.world_size}: the counts make {total} ({spelled})")
    if not settings.role and settings.rank is not None:
        left = settings.rank
        for role in counts:
            if left < role.count:
                return Identity(role.name, left)
            left -= role.count
        raise UsageError(f"RANK={settings.rank}: the job has ranks 0 to {total - 1}")
    by_name = {role.name: role for role in counts}
    if settings.role not in by_name:
        problem = "is missing" if not settings.role else "no such role"
        raise UsageError(f"ROLE={settings.role!r}: {problem} ({', '.join(by_name)})")
    role = by_name[settings.role]
    ordinal = settings.ordinal
    source = "ORDINAL"
    if ordinal is None and (match := re.search(rf"(?:^|-){re.escape(role.name)}-(\d{{1,4}})$", host)):
        ordinal, source = int(match.group(1)), f"the host name {host}"
    if ordinal is None and role.maximum == 1:
        ordinal = 0
    if ordinal is not None and ordinal >= role.maximum:
        raise UsageError(f"{source}={ordinal}: {role.name} has ordinals 0 to {role.maximum - 1}")
    return Identity(role.name, ordinal)
