"""What the author of a job declares: its roles, its settings, its metrics."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rolecall.config import Settings
from rolecall.declare import loader
from rolecall.errors import UsageError
from rolecall.fields import is_secret
from rolecall.telemetry import SHARED, Metric

Function = Callable[..., Any] | str  # a callable, or its `module:name`, imported where it is needed
COMMAND = "rolecall.__main__"  # a name: it imports this module
MOST = 1024  # members of an elastic role without a maximum
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")  # of a role or a metric
NAMES = "a name consists of small letters, digits and _, and begins with a letter"
# variables that any environment has, and flags of `rolecall run`
RESERVED = {
    "path",
    "home",
    "user",
    "shell",
    "lang",
    "pwd",
    "term",
    "hostname",
    "tmpdir",
    "editor",
    "display",
    "logname",
    "plain",
    "help",
    "ranks",
    "hosts",
    "python",
    "in_process",
    "on",
    "image",
    "name",
    "detach",
}


@dataclass(frozen=True)
class Role:
    """One role of a job. The first role's member 0 is rank 0, which coordinates and writes checkpoints.

    `run` is a function, which is called with a `Context`, or a class, of which each member's worker makes one object
    with its `Context`. Peers call the methods of that object which `remote` marks. If the class has a method
    `attached(self, context)`, it is called each time the member has become a part of a generation; if it has a method
    `run(self)`, that is called after it. Once that has returned, or without one, the member serves calls only.

    A start waits for `count` members. A `minimum` makes the role elastic: its members, at most `maximum`, may join and
    leave while the job trains. The three are numbers or names of settings. A member of an elastic role that dies within
    half a minute after it joined, more than once in a row, waits for `backoff` seconds, twice as long each time (None:
    2 * REJOIN_INTERVAL), at most `restarts` times (None: always). Then it is given up, or the job fails if `required`.

    The workers of a role that `stays` keep their process and object when a generation ends because of others, and join
    a running one (default: those of an elastic role with a class). Those of other roles are fresh processes in each
    generation: as they must be for a process group, whose members cannot change.

    A worker whose resident memory exceeds `max_memory_mb` (10^6 bytes) fails, and is replaced (None: no limit).

    `gpus` is how many GPUs each member gets to itself under `rolecall run` (0: it sees none; None: it sees all). `cpus`
    and `memory_mb` (10^6 bytes) are what it is given by Docker, Slurm and Kubernetes (None: their default).
    `preload` lists slow modules to import once, before workers are forked.
    """

    name: str
    run: Function | None = None
    count: str | int = 1
    minimum: str | int | None = None
    maximum: str | int | None = None
    gpus: int | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    preload: Sequence[str] = ()
    stays: bool | None = None
    restarts: int | None = None
    backoff: float | None = None
    required: bool = False
    max_memory_mb: int | None = None

    @property
    def elastic(self) -> bool:
        """Whether members may join and leave while the job trains."""
        return self.minimum is not None


@dataclass(frozen=True)
class Job:
    """A topology: its roles, its settings, and what else Rolecall can do with it. Raises UsageError for contradictions.

    `check` is called with the settings before a rank joins, and raises UsageError for what can never work.
    `evaluate` is called with the settings and a checkpoint's state by `rolecall eval JOB`; `complete`, of a job whose
    model writes text, is called with a prompt too; `export`, by `rolecall export JOB`, returns the model of that state
    as an `Exported`. `pinned` names the settings that a checkpoint depends on: they are saved with it, must be the same
    on resume, and are restored for these functions. `layout` counts the forms that the state has had: raise it with a
    change after which earlier checkpoints cannot be used, and they are refused.

    `training_only` names the sharded values of the state that these functions do not use, and that are not read for
    them, such as a replay buffer.

    Keyword-only parameters of `evaluate` and `complete` are options of `rolecall eval JOB`: see docs/job-reference.md.

    `score` labels the curve that `Context.log` draws, of which lower is better if `lower` is set; `unit` is what
    its `done` counts. Without `rpc`, workers do not connect: the roles' functions do, through `Context.adopt`. Without
    `steps`, the job is a service, which makes no progress: PROGRESS_TIMEOUT is the time after which earlier deaths are
    forgotten.
    """

    roles: Sequence[Role]
    settings: type[Settings] = Settings
    summary: str = ""
    check: Function | None = None
    evaluate: Function | None = None
    complete: Function | None = None
    export: Function | None = None
    score: str = "score"
    unit: str = "steps"
    lower: bool = False
    metrics: Sequence[Metric] = ()
    pinned: Sequence[str] = ()
    training_only: Sequence[str] = ()
    rpc: bool = True
    layout: int = 1
    steps: bool = True

    def __post_init__(self) -> None:
        frame = sys._getframe(2)  # below __init__
        object.__setattr__(self, "declared_in", frame.f_globals.get("__name__", ""))
        for problem in (*self._problems_of_settings(), *self._problems_of_roles(), *self._problems_of_metrics()):
            raise UsageError(problem)

    def main(self) -> NoReturn:
        """Runs the job as `rolecall run FILE` does, with this process's flags, and ends it with the same exit code: for
        `if __name__ == "__main__": JOB.main()`."""
        loader.require_imported()
        sys.exit(importlib.import_module(COMMAND).main_of(self))

    def _problems_of_settings(self) -> Iterator[str]:
        cls = self.settings
        if Settings not in getattr(cls, "__mro__", ()):
            yield f"Job(settings={cls!r}): is not a subclass of rolecall.Settings"
            return
        below = cls.__mro__[: cls.__mro__.index(Settings)]
        declared = {name for base in below for name in loader.annotations_of(base)}
        for name in declared & set(Settings.model_fields):
            yield f"{cls.__name__}.{name}: Rolecall has a setting {name.upper()} already; choose another name"
        for name, field in cls.model_fields.items():
            if name in RESERVED and not cls.__module__.startswith("rolecall."):
                yield f"{cls.__name__}.{name}: the variable {name.upper()} means something else; choose another name"
            elif name in declared and hasattr(Settings, name):  # a method or a property
                yield f"{cls.__name__}.{name}: rolecall.Settings has an attribute of that name; choose another"
            elif field.is_required():
                yield f"{cls.__name__}.{name}: has no default; give it one"
        for name in self.pinned:
            if name not in cls.model_fields:
                yield f"Job(pinned=...): {cls.__name__} has no setting {name!r}"
            elif is_secret(cls.model_fields[name]):
                yield f"Job(pinned=...): {cls.__name__}.{name} is a secret, which no checkpoint holds; leave it out"

    def _problems_of_roles(self) -> Iterator[str]:
        if not self.roles or not all(isinstance(role, Role) for role in self.roles):
            yield "Job(roles=...): needs a list of rolecall.Role"
            return
        first, names = self.roles[0], [role.name for role in self.roles]
        if len(set(names)) < len(names):
            yield f"Job(roles=...): two roles have the same name ({', '.join(names)})"
        if first.elastic:
            yield f"role {first.name}: has rank 0, and cannot be elastic; leave its minimum out"
        if first.run is None:
            yield f"role {first.name}: has rank 0, and needs a function: Role({first.name!r}, function)"
        if isinstance(first.run, type) and not callable(getattr(first.run, "run", None)):
            yield f"role {first.name}: has rank 0, and its class {first.run.__name__} needs a method run(self)"
        for role in self.roles:
            if not NAME.fullmatch(role.name):
                yield f"role {role.name!r}: {NAMES}"
            if role.run is not None and not callable(role.run) and not re.fullmatch(r"[\w.]+:\w+", str(role.run)):
                yield f"role {role.name}: {role.run!r} is neither a function nor a class"
            yield from self._problems_of_restarts(role)
            for number in (role.count, role.minimum, role.maximum):
                if isinstance(number, str) and number.lower() not in self.settings.model_fields:
                    yield f"role {role.name}: {self.settings.__name__} has no setting {number!r} to count members by"

    @staticmethod
    def _problems_of_restarts(role: Role) -> Iterator[str]:
        if role.stays and inspect.isfunction(role.run):
            yield f"role {role.name}: stays=True needs a class, whose object stays, not a function"
        if not role.elastic and (role.restarts, role.backoff, role.required) != (None, None, False):
            advice = "MAX_RESTARTS and MAX_FAILURES bound those of a fixed role"
            yield f"role {role.name}: restarts, backoff and required are for an elastic role (minimum=...); {advice}"
        if role.required and role.restarts is None:
            yield f"role {role.name}: required=True needs restarts=..., after which the job fails"
        if (role.restarts or 0) < 0 or (role.backoff or 0.0) < 0:
            yield f"role {role.name}: restarts and backoff cannot be negative"
        if role.max_memory_mb is not None and role.max_memory_mb <= 0:
            yield f"role {role.name}: max_memory_mb={role.max_memory_mb} must be above 0; None means no limit"

    def _problems_of_metrics(self) -> Iterator[str]:
        if not all(isinstance(metric, Metric) for metric in self.metrics):
            yield "Job(metrics=...): needs a list of rolecall.Metric"
            return
        seen = set[str]()
        for metric in self.metrics:
            if not NAME.fullmatch(metric.name):
                yield f"metric {metric.name!r}: {NAMES}"
            if metric.attribute in SHARED:
                yield f"metric {metric.name}: Rolecall has a metric of that name already; choose another"
            if metric.attribute in seen:
                yield f"Job(metrics=...): two metrics have the name {metric.name}"
            seen.add(metric.attribute)
