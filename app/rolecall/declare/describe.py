"""What a process without torch knows of a job: its roles, its settings, its labels.

A built-in job describes itself without torch. A user's job is described by a child process, which imports the user's
file, and torch with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rolecall import config, fields
from rolecall.config import Settings, __version__
from rolecall.declare import flags, preflight, registry, sources
from rolecall.declare.spec import Job, Role
from rolecall.errors import USAGE, UsageError
from rolecall.gang.protocol import RoleSpec, SharedSettings

MOST_VALUE = 200  # characters of a setting in a heartbeat
DEADLINE = 120.0  # seconds for a user's file to be imported: torch alone takes several on a busy machine


def _brief(value: Any) -> Any:
    """`value`, or of a long one its beginning and a digest."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE // 4]}... ({digest(value)})"


@dataclass(frozen=True)
class Needs:
    """What each member of a role is given, as `Role` has it; None is the engine's default."""

    gpus: int | None = None
    cpus: float | None = None
    memory_mb: int | None = None


@dataclass(frozen=True)
class Description:
    """A job with its settings filled in.

    `target` is JOB; `version` identifies the file; `settings` are those that not every job has, in JSON's types, and
    `secrets` the names of those that each process takes from its environment instead; `agreed` are the names of the
    settings that every rank must share; `steps` says whether the job reports steps. `flags` are the variables that were
    given on the command line, `plain` is its option.
    """

    name: str
    target: str
    version: str
    summary: str
    roles: tuple[RoleSpec, ...]
    needs: dict[str, Needs]
    preloads: dict[str, tuple[str, ...]]
    score: str
    unit: str
    lower: bool
    settings: dict[str, Any]
    secrets: tuple[str, ...] = ()
    agreed: tuple[str, ...] = ()
    steps: bool = True
    flags: dict[str, str] = field(default_factory=dict)
    plain: bool = False

    @property
    def identity(self) -> str:
        """What ranks compare: the name and the version."""
        return f"{self.name} ({self.version})"

    def agreement(self, settings: Settings) -> SharedSettings:
        """What ranks compare of their settings, which are these and `settings`."""
        values = {**settings.model_dump(mode="json"), **self.settings}
        agreed = {name.upper(): _brief(values[name]) for name in sorted(self.agreed)}
        return SharedSettings(digest(agreed), agreed)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that not every job has."""
        return tuple(name.upper() for name in (*self.settings, *self.secrets))

    @property
    def ranks(self) -> int:
        """The world size that a start waits for."""
        return sum(role.count for role in self.roles)

    def to_json(self) -> str:
        """The description as JSON, with infinity, which pydantic's JSON does not have; `ADAPTER` reads it."""
        return json.dumps(asdict(self), indent=1)

    def preload(self, role: str) -> tuple[str, ...]:
        """Modules to import before workers of `role` are forked; of every role if it is empty."""
        roles = [role] if role else list(self.preloads)
        return tuple(dict.fromkeys(name for role in roles for name in self.preloads[role]))


ADAPTER = TypeAdapter(Description)


def digest(values: Any) -> str:
    """A short digest of values in JSON's types."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def describe(target: str, arguments: Sequence[str] = (), replaced: Mapping[str, Any] | None = None) -> Description:
    """Describes `target`, in this process, with the settings that flags in `arguments` change, and with those in
    `replaced`, by field, in the place of the environment's. Raises UsageError, also for what no worker could do with a
    user's file, and SystemExit for a request for help.
    """
    given = flags.parse(registry.get(target), target, arguments)
    variables = {name.lower(): value for name, value in given.variables.items()}
    job, settings = registry.load(target, **{**variables, **(replaced or {})})
    if target not in registry.JOBS:
        preflight.require_sound(job, registry.module_of(target))
    return of_job(job, settings, target, given, _version(target, job))


def of_job(
    job: Job, settings: Settings, target: str, given: flags.Flags | None = None, version: str = __version__
) -> Description:
    """Describes `job`, which `target` names, with `settings`."""
    roles = registry.roles(job, settings)
    values = {name: field for name, field in job.settings.model_fields.items() if name not in Settings.model_fields}
    secrets = tuple(name for name, field in values.items() if fields.is_secret(field))
    return Description(
        name=registry.name_of(target),
        target=registry.absolute(target),
        version=version,
        summary=job.summary,
        roles=roles,
        needs={role.name: _needs(role, settings) for role in job.roles},
        preloads={role.name: tuple(role.preload) for role in job.roles},
        score=job.score,
        unit=job.unit,
        lower=job.lower,
        settings=settings.model_dump(mode="json", include=set(values) - set(secrets)),
        secrets=secrets,
        agreed=_agreed(job),
        steps=job.rpc and job.steps,
        flags=given.variables if given else {},
        plain=given is not None and given.plain,
    )


def _needs(role: Role, settings: Settings) -> Needs:
    return Needs(role.gpus and role.gpus * (settings.device != "cpu"), role.cpus, role.memory_mb)


def _agreed(job: Job) -> tuple[str, ...]:
    """The settings that every rank must share: the job's, but for secrets, those that may differ, and the counts of
    elastic roles, which change while the job trains; and a few that all jobs have."""
    counts = {number for role in job.roles if role.elastic for number in (role.count, role.minimum, role.maximum)}
    scaled = {number.lower() for number in counts if isinstance(number, str)}
    return tuple(
        name
        for name, field in job.settings.model_fields.items()
        if fields.agrees(field, name not in Settings.model_fields)
        and not fields.is_secret(field)
        and name not in scaled
    )


def _version(target: str, job: Job) -> str:
    if target in registry.JOBS:
        return __version__
    module = registry.module_of(target)
    digest = hashlib.sha256(repr([role.name for role in job.roles]).encode())
    with contextlib.suppress(OSError, TypeError):  # a module without a file
        digest.update(sources.content(Path(str(module.__file__))))
    return digest.hexdigest()[:12]


def call(arguments: Sequence[str], seconds: float) -> int:
    """Runs `rolecall ARGUMENTS`. Returns its exit code. Raises TimeoutError after `seconds`."""
    command = [sys.executable, "-P", "-m", "rolecall", *arguments]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


def ask(target: str, arguments: Sequence[str] = (), call: Callable[[Sequence[str], float], int] = call) -> Description:
    """The description of the job that `target` names, with the flags in `arguments`: from this process for a built-in
    job, otherwise from a child process. `call` runs a command of Rolecall's in one, for some seconds at most, and
    returns its exit code. Raises UsageError, and SystemExit if the child process has said what is
    wrong, or has given the help that `arguments` request.
    """
    registry.require_target(target)
    if target in registry.JOBS:
        return describe(target, arguments)
    with tempfile.TemporaryDirectory(prefix="rolecall-") as directory:
        output = Path(directory) / "description"
        try:
            code = call(["describe", "--output", str(output), target, *arguments], DEADLINE)
        except TimeoutError:
            raise UsageError(f"JOB={target}: its import took over {DEADLINE:g} s") from None
        if code < 0:
            raise UsageError(f"JOB={target}: its import ended by {signal.Signals(-code).name}")
        if code or not output.exists():
            if not code and not {"-h", "--help"} & set(arguments):
                raise UsageError(f"JOB={target}: its import ended the process")
            raise SystemExit(USAGE if code == 1 else code)
        return ADAPTER.validate_json(output.read_bytes())


def passed_on(description: Description) -> dict[str, str]:
    """The variable that gives the ranks of `rolecall run` the description, so that they need not ask for it."""
    return {config.DESCRIPTION: description.to_json()}


def of_rank(target: str) -> Description:
    """The description for a rank: the one that `rolecall run` has passed on to it, or `ask`'s."""
    if passed := config.exported(config.DESCRIPTION):
        return ADAPTER.validate_json(passed)
    return ask(target)
