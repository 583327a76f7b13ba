"""A checkpoint as `rolecall eval` and `rolecall export` read it: with the settings that it was trained with."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rolecall import config, fields, telemetry
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.config import Settings
from rolecall.declare import loader
from rolecall.declare.spec import Job
from rolecall.errors import FAILED, ProgramError, UsageError

LONGEST = 4000  # characters of a line, which may repeat what a checkpoint says


def guarded(command: Callable[[], int]) -> int:
    """The exit code of `command`, which calls a job's functions: FAILED where they raise, after a traceback without
    Rolecall's frames. Raises UsageError, with file and line where it is the user's, and SystemExit as argparse does.
    """
    try:
        return command()
    except UsageError as error:
        raise UsageError(fields.shown(loader.explain(error), most=LONGEST)) from error
    except ProgramError as error:
        print(f"rolecall: {fields.shown(error, most=LONGEST)}", file=sys.stderr, flush=True)
    except Exception as error:
        if not loader.locate(error):
            raise
        print(loader.users_traceback(error), end="", file=sys.stderr, flush=True)
    return FAILED


def flags(job: Job) -> list[str]:
    """The settings that a command has flags for: those that a checkpoint depends on, and that the user must give."""
    return [name for name in job.pinned if fields.is_from_user(job.settings.model_fields[name])]


def add_flags(parser: argparse.ArgumentParser, job: Job, target: str) -> None:
    """Adds a flag for each of `flags`."""
    group = parser.add_argument_group(f"settings of {target} that name code or a file") if flags(job) else parser
    for name in flags(job):
        about = (job.settings.model_fields[name].description or "").replace("%", "%%")
        group.add_argument(flag(name), metavar="VALUE", dest=name, default=argparse.SUPPRESS, help=about)


def given(job: Job, arguments: argparse.Namespace) -> dict[str, str]:
    """The settings that the command line gives: the job's own name, and the values of `flags`."""
    return {"job": arguments.job, **{name: getattr(arguments, name) for name in flags(job) if name in arguments}}


def flag(name: str) -> str:
    """The flag of a setting, or of an option of a job's function."""
    return f"--{name.replace('_', '-')}"


def load(job: Job, name: str, path: Path, given: Mapping[str, str], advice: str) -> tuple[Settings, Snapshot]:
    """The checkpoint `path` of the job `name`, or the newest in the directory `path`, and the settings: `given` ones,
    the environment's, and those that the checkpoint depends on. A line on standard error names a setting that is
    another in the checkpoint. Raises UsageError, also where the checkpoint names code or a file that the user does not
    name too; `advice` is for another layout.
    """
    settings = config.load(job.settings, **given)
    telemetry.setup_logging(settings.log_format, settings.log_level, stream=sys.stderr)
    snapshot = _read(path, name)
    snapshot.require_layout(job.layout, advice)
    taken = _taken(job, settings, snapshot)
    try:
        return config.load(job.settings, **{**settings.model_dump(), **taken}), snapshot
    except UsageError as error:  # they were right without it
        raise UsageError(f"{snapshot.path.name}: {error}") from error


def _taken(job: Job, settings: Settings, snapshot: Snapshot) -> dict[str, Any]:
    """The values of pinned settings that the checkpoint gives. Raises UsageError as `load` does."""
    file, taken = snapshot.path.name, dict[str, Any]()
    current = settings.model_dump(mode="json", include=set(job.pinned))
    for name in job.pinned:
        if name not in snapshot.pinned:
            continue
        before, now, given = snapshot.pinned[name], current[name], name in settings.model_fields_set
        said = ""
        if fields.is_harmless(job.settings.model_fields[name], before):
            taken[name] = before
            if given and now != before:
                said = f"{name.upper()}={now} is ignored: {file} was made with {fields.shown(before)}"
        elif not given:
            value = fields.shown(before)
            advice = f"if you trust it, give it yourself: {flag(name)}={shlex.quote(value)}"
            raise UsageError(f"{file}: names code or a file of its own, {name.upper()}={value}; {advice}")
        elif now != before:
            said = f"{name.upper()}={now} is used: {file} was made with {fields.shown(before)}"
        if said:
            print(f"rolecall: {said}", file=sys.stderr, flush=True)
    return taken


@contextlib.contextmanager
def given_to(name: str, snapshot: Snapshot) -> Iterator[None]:
    """Calls a function of the job `name` with the contents of the checkpoint: what the function of a built-in job
    raises becomes a UsageError, as the checkpoint holds something else than its job saves. The traceback is logged with
    LOG_LEVEL=debug. What a user's function raises passes.
    """
    try:
        yield
    except (UsageError, ProgramError):
        raise
    except Exception as error:
        if loader.locate(error):
            raise
        telemetry.log().debug("the checkpoint cannot be used", exc_info=error)
        first = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {first}"
        raise UsageError(f"{snapshot.path.name}: holds no state of {name} ({fields.shown(problem)})") from error


def numbers(name: str, result: Any) -> dict[str, int | float]:
    """What `evaluate` of the job `name` returned, as numbers. Raises UsageError where it is something else."""
    with UsageError.wrap(f"{name}: evaluate returns what is no number", TypeError, ValueError, AttributeError,
                         advice="return numbers by name"):  # fmt: skip
        return {str(what): value if type(value) is int else float(value) for what, value in result.items()}


def _read(path: Path, name: str) -> Snapshot:
    if not path.exists():
        raise UsageError(f"--checkpoint {path}: no such file or directory")
    try:
        snapshot = checkpoint.Checkpoints(path, name).newest() if path.is_dir() else checkpoint.read(path, name).whole()
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from error
    if snapshot is None:
        raise UsageError(f"--checkpoint {path}: holds no checkpoint")
    return snapshot
