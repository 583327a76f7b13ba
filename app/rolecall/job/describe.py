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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rolecall import config
from rolecall.config import Settings, UsageError, __version__
from rolecall.fields import is_secret
from rolecall.gang.protocol import USAGE, RoleSpec
from rolecall.job import flags, registry

DEADLINE = 120.0  # seconds for a user's file to be imported: torch alone takes several on a busy machine


@dataclass(frozen=True)
class Description:
    """A job with its settings filled in.

    `target` is JOB; `version` identifies the file; `settings` are those that not every job has, in JSON's types, and
    `secrets` the names of those that each process takes from its environment instead; `flags` are the variables that
    were given on the command line, `plain` is its option.
    """

    name: str
    target: str
    version: str
    summary: str
    roles: tuple[RoleSpec, ...]
    gpus: dict[str, int | None]
    preloads: dict[str, tuple[str, ...]]
    score: str
    unit: str
    lower: bool
    settings: dict[str, Any]
    secrets: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    plain: bool = False

    @property
    def identity(self) -> str:
        """What ranks compare: the name and the version."""
        return f"{self.name} ({self.version})"

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
        """Modules to import before workers of `role` are forked; of every role, where it is empty."""
        roles = [role] if role else list(self.preloads)
        return tuple(dict.fromkeys(name for role in roles for name in self.preloads[role]))


ADAPTER = TypeAdapter(Description)


def describe(target: str, arguments: Sequence[str] = ()) -> Description:
    """Describes `target`, in this process, with the settings that flags in `arguments` change. Raises UsageError, and
    SystemExit for a request for help.
    """
    given = flags.parse(registry.get(target), target, arguments)
    job, settings = registry.load(target, **{name.lower(): value for name, value in given.variables.items()})
    roles = registry.roles(job, settings)
    fields = {name: field for name, field in job.settings.model_fields.items() if name not in Settings.model_fields}
    secrets = tuple(name for name, field in fields.items() if is_secret(field))
    return Description(
        name=registry.name_of(target),
        target=registry.absolute(target),
        version=_version(target, roles),
        summary=job.summary,
        roles=roles,
        gpus={role.name: role.gpus for role in job.roles},
        preloads={role.name: tuple(role.preload) for role in job.roles},
        score=job.score,
        unit=job.unit,
        lower=job.lower,
        settings=settings.model_dump(mode="json", include=set(fields) - set(secrets)),
        secrets=secrets,
        flags=given.variables,
        plain=given.plain,
    )


def _version(target: str, roles: Sequence[RoleSpec]) -> str:
    if target in registry.JOBS:
        return __version__
    module = registry.module_of(target)
    digest = hashlib.sha256(repr([role.name for role in roles]).encode())
    with contextlib.suppress(OSError, TypeError):  # a module without a file
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def ask(target: str, arguments: Sequence[str] = ()) -> Description:
    """The description of the job that `target` names, with the flags in `arguments`: from this process for a built-in
    job, otherwise from a child process. Raises UsageError, and SystemExit where the child process has said what is
    wrong, or has given the help that `arguments` request.
    """
    registry.require_target(target)
    if target in registry.JOBS:
        return describe(target, arguments)
    with tempfile.TemporaryDirectory(prefix="rolecall-") as directory:
        output = Path(directory) / "description"
        command = [sys.executable, "-P", "-m", "rolecall", "describe", "--output", str(output), target, *arguments]
        try:
            child = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            raise UsageError(f"JOB={target}: its import took over {DEADLINE:g} s") from None
        if child.returncode < 0:
            raise UsageError(f"JOB={target}: its import ended by {signal.Signals(-child.returncode).name}")
        if child.returncode or not output.exists():
            if not child.returncode and not {"-h", "--help"} & set(arguments):
                raise UsageError(f"JOB={target}: its import ended the process")
            raise SystemExit(USAGE if child.returncode == 1 else child.returncode)
        return ADAPTER.validate_json(output.read_bytes())


def passed_on(description: Description) -> dict[str, str]:
    """The variable that gives the ranks of `rolecall run` the description, so that they need not ask for it."""
    return {config.DESCRIPTION: description.to_json()}


def of_rank(target: str) -> Description:
    """The description for a rank: the one that `rolecall run` has passed on to it, or `ask`'s."""
    if passed := config.passed_description():
        return ADAPTER.validate_json(passed)
    return ask(target)
