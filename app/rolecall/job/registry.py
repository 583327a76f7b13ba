"""The registry: job -> settings, roles, and the functions that its ranks run (imported when they are needed).

A new topology is a folder beside this file, whose `__init__` holds a `JOB`, and its name in `JOBS`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rolecall import config
from rolecall.config import Settings, UsageError
from rolecall.gang import protocol
from rolecall.telemetry import Metric

JOBS = ("rl", "ps", "rnn", "hybrid")


@dataclass(frozen=True)
class Role:
    """One role of a job. The first role of a job has one member: rank 0, which coordinates and writes checkpoints.

    `run` is a `module:function` that is called with a `Context`. The counts name settings: `count` is what a start waits
    for; `minimum` and `maximum` bound an elastic role, whose members come and go while the job trains. `preload` are
    modules that take long to import and are imported before a worker is forked, not in each worker.
    """

    name: str
    run: str
    count: str = ""
    minimum: str = ""
    maximum: str = ""
    preload: tuple[str, ...] = ()

    @property
    def elastic(self) -> bool:
        return bool(self.minimum)


@dataclass(frozen=True)
class Watched:
    """The metrics of a job that the live display draws: `curve` over time, under the name `curve_label` and with its
    `goal`; the counter `rate` per second, in `rate_label`; and `left`, the seconds that the job will still take.
    `lower` says that a lower value of the curve is a better one.
    """

    curve: str
    curve_label: str
    rate: str
    rate_label: str
    goal: str = ""
    left: str = ""
    lower: bool = False


@dataclass(frozen=True)
class Job:
    """A topology: its settings, its roles, and where its functions are.

    `check` is called with the settings before a rank joins, and raises UsageError for what can never work.
    `evaluate` is called with the settings and a checkpoint's state by `python -m rolecall eval JOB`; `complete`, of a job
    whose model writes text, with a prompt too where one is given.
    `metrics` names the module that holds the job's metrics; `watch` is what the live display draws of them.
    """

    summary: str
    settings: type[Settings]
    roles: tuple[Role, ...]
    check: str
    evaluate: str
    metrics: str
    watch: Watched
    complete: str = ""


@dataclass(frozen=True)
class Identity:
    """Which rank a process is; `ordinal` is None where the gang assigns one."""

    role: str
    ordinal: int | None


def get(name: str) -> Job:
    """The job called `name`. Raises UsageError where there is none."""
    if name not in JOBS:
        raise UsageError(f"JOB={name!r}: " + ("is missing" if not name else "no such job") + f" ({', '.join(JOBS)})")
    return cast(Job, importlib.import_module(f"rolecall.jobs.{name}").JOB)


def load(name: str = "", **overrides: Any) -> tuple[Job, Settings]:
    """The job that the environment (or `name`) names, and its settings."""
    name = name or config.job_name()
    job = get(name)
    return job, config.load(job.settings, job=name, **overrides)


def resolve(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = target.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


def factory(variable: str, target: str) -> Callable[..., Any]:
    """The user's callable that `variable` names as `package.module:name`; modules beside the working directory count
    too. Raises UsageError where there is none."""
    module, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's code: whatever its import raises is theirs to see
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"{variable}={target}: cannot be imported ({problem}); write package.module:name") from error
    if not callable(found):
        raise UsageError(f"{variable}={target}: is not callable")
    return cast(Callable[..., Any], found)


def counts() -> tuple[str, ...]:
    """The variables that count ranks, of all jobs."""
    return tuple(dict.fromkeys(role.count for name in JOBS for role in get(name).roles if role.count))


def metrics(job: Job) -> tuple[Metric, ...]:
    """The metrics that the job's workers have beside those of every worker."""
    return cast(tuple[Metric, ...], importlib.import_module(job.metrics).METRICS)


def roles(job: Job, settings: Settings) -> tuple[protocol.RoleSpec, ...]:
    """The job's roles with their counts filled in. Raises UsageError where the counts contradict each other."""

    def number(name: str, default: int) -> int:
        return int(getattr(settings, name.lower())) if name else default

    found = []
    for role in job.roles:
        count = number(role.count, 1)
        low, high = number(role.minimum, count), number(role.maximum, count)
        if not low <= count <= high:
            raise UsageError(
                f"wrong settings: {role.count}={count} must lie between {role.minimum}={low} and {role.maximum}={high}"
            )
        found.append(protocol.RoleSpec(role.name, count, low, high, role.elastic))
    return tuple(found)


def identity(job: Job, settings: Settings, host: str) -> Identity:
    """Which rank this process is, from ROLE and ORDINAL, the host name, or torch's RANK.

    A host name gives an ordinal where it is exactly <role>-<n> or ends in -<role>-<n>, as a StatefulSet's pods do.
    Raises UsageError where the role is missing or unknown, or the ordinal impossible.
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
