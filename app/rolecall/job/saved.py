"""A checkpoint as `rolecall eval` and `rolecall export` read it: with the settings that it was trained with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang.protocol import FAILED
from rolecall.job import checkpoint, loader
from rolecall.job.checkpoint import Snapshot
from rolecall.job.spec import Job
from rolecall.job.task import ProgramError


def guarded(command: Callable[[], int]) -> int:
    """The exit code of `command`, which calls a job's functions: FAILED where they raise, after a traceback without
    Rolecall's frames. Raises UsageError, with file and line where it is the user's, and SystemExit as argparse does.
    """
    try:
        return command()
    except UsageError as error:
        raise UsageError(loader.explain(error)) from error
    except ProgramError as error:
        print(f"rolecall: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        if not loader.locate(error):
            raise
        print(loader.users_traceback(error), end="", file=sys.stderr, flush=True)
    return FAILED


def load(job: Job, name: str, target: str, path: Path, advice: str) -> tuple[Settings, Snapshot]:
    """The checkpoint `path` of the job `name`, or the newest in the directory `path`, and the settings from the
    environment, but for those that the checkpoint depends on: a line on standard error names a variable that has
    another value. Raises UsageError; `advice` is for another layout.
    """
    settings = config.load(job.settings, job=target)
    telemetry.setup_logging(settings.log_format, settings.log_level, stream=sys.stderr)
    snapshot = _read(path, name)
    snapshot.require_layout(job.layout, advice)
    for setting, now, before in snapshot.contradicted(settings, only_given=True):
        said = f"{setting.upper()}={now} is ignored: {snapshot.path.name} was made with {before}"
        print(f"rolecall: {said}", file=sys.stderr, flush=True)
    return config.load(job.settings, **{**settings.model_dump(), **snapshot.about.get("settings", {})}), snapshot


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
