"""A checkpoint with its job and the settings that it was trained with, for `rolecall eval` and `rolecall export`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall import config, fields, telemetry
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.config import Settings
from rolecall.declare import loader, registry
from rolecall.declare.spec import Job
from rolecall.errors import FAILED, ProgramError, UsageError

MAX_LINE = 4000  # characters of an error, which may quote a checkpoint


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the `job` that is called `name`, and the settings that it was trained with."""

    job: Job
    name: str
    settings: Settings
    snapshot: Snapshot

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Converts what a function of the job raises for the checkpoint's contents. An error of a built-in job becomes
        a UsageError: the checkpoint does not hold the job's state; the traceback is logged with LOG_LEVEL=debug. An
        error of a user's function passes.
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
            problem = fields.shown(f"{type(error).__name__}: {first}")
            raise UsageError(f"{self.snapshot.path.name}: holds no state of {self.name} ({problem})") from error

    def numbers(self, result: Any) -> dict[str, int | float]:
        """The `result` of the job's `evaluate` as numbers. Raises UsageError for another result."""
        problem, advice = f"{self.name}: evaluate returns what is no number", "return numbers by name"
        with UsageError.wrap(problem, TypeError, ValueError, AttributeError, advice=advice):
            return {str(what): value if type(value) is int else float(value) for what, value in result.items()}


def guarded(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """`command`, which calls a job's functions, with the exit code FAILED if they raise, after a traceback without
    Rolecall's frames. Raises UsageError, with the file and line of the user's code, and SystemExit as argparse does.
    """

    @functools.wraps(command)
    def run(words: Sequence[str]) -> int:
        try:
            return command(words)
        except UsageError as error:
            raise UsageError(fields.shown(loader.explain(error), most=MAX_LINE)) from error
        except ProgramError as error:
            print(f"rolecall: {fields.shown(error, most=MAX_LINE)}", file=sys.stderr, flush=True)
        except Exception as error:
            if not loader.locate(error):
                raise
            print(loader.users_traceback(error), end="", file=sys.stderr, flush=True)
        return FAILED

    return run


def flags(job: Job) -> list[str]:
    """The settings that have flags: a checkpoint depends on them, and the user must give them."""
    return [name for name in job.pinned if fields.is_from_user(job.settings.model_fields[name])]


def add_flags(parser: argparse.ArgumentParser, job: Job, target: str) -> None:
    """Adds a flag for each of `flags`."""
    group = parser.add_argument_group(f"settings of {target} that name code or a file") if flags(job) else parser
    for name in flags(job):
        about = (job.settings.model_fields[name].description or "").replace("%", "%%")
        group.add_argument(flag(name), metavar="VALUE", dest=name, default=argparse.SUPPRESS, help=about)


def parser(program: str, description: str, full: bool) -> argparse.ArgumentParser:
    """The parser of `program` with JOB, --checkpoint and --json; one that is not `full` requires nothing."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False, add_help=full)
    target = f"{', '.join(registry.JOBS)}, FILE.py, or package.module[:NAME]"
    parser.add_argument("job", metavar="JOB", help=target, nargs=None if full else "?")
    parser.add_argument("--checkpoint", type=Path, required=full, help="a checkpoint, or a directory of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def flag(name: str) -> str:
    """The flag of a setting, or of an option of a job's function."""
    return f"--{name.replace('_', '-')}"


def load(job: Job, name: str, arguments: argparse.Namespace, advice: str) -> Saved:
    """The checkpoint `arguments.checkpoint` of the job `name`, or the newest one in that directory, with the settings:
    the command line's, the environment's, and those that the checkpoint depends on. A line on standard error names each
    setting that differs from the checkpoint's. Raises UsageError, also if the checkpoint names code or a file that the
    user does not name; `advice` is for a checkpoint of another layout.
    """
    given = {each: getattr(arguments, each) for each in flags(job) if each in arguments}
    settings = config.load(job.settings, job=arguments.job, **given)
    telemetry.setup_logging(settings.log_format, settings.log_level, stream=sys.stderr)
    snapshot = _read(arguments.checkpoint, name, job.training_only)
    snapshot.require_layout(job.layout, advice)
    taken = _taken(job, settings, snapshot)
    try:
        return Saved(job, name, config.load(job.settings, **{**settings.model_dump(), **taken}), snapshot)
    except UsageError as error:  # without the checkpoint's values they were valid
        raise UsageError(f"{snapshot.path.name}: {error}") from error


def _taken(job: Job, settings: Settings, snapshot: Snapshot) -> dict[str, Any]:
    """The pinned settings whose values come from the checkpoint. Raises UsageError as `load` does."""
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
            raise UsageError(f"{file}: names code or a file, {name.upper()}={value}; {advice}")
        elif now != before:
            said = f"{name.upper()}={now} is used: {file} was made with {fields.shown(before)}"
        if said:
            print(f"rolecall: {said}", file=sys.stderr, flush=True)
    return taken


def _read(path: Path, name: str, without: Collection[str]) -> Snapshot:
    if not path.exists():
        raise UsageError(f"--checkpoint {path}: no such file or directory")
    try:
        if path.is_dir():
            snapshot = checkpoint.Checkpoints(path, name).newest(lambda each: each.whole(without))
        else:
            snapshot = checkpoint.read(path, name).whole(without)
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from error
    if snapshot is None:
        raise UsageError(f"--checkpoint {path}: holds no checkpoint")
    return snapshot
