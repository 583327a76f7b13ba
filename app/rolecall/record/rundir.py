"""The files beside a run's checkpoints: the newest generation's number, DONE, FAILED, the report's names, the locks."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from rolecall.errors import UsageError
from rolecall.gang.protocol import Budget, Key
from rolecall.record.files import HISTORY as HISTORY
from rolecall.record.files import SUMMARY as SUMMARY
from rolecall.record.files import sync_directory as sync_directory
from rolecall.record.files import using as using
from rolecall.record.files import write_atomically as write_atomically
from rolecall.record.records import FOLDER as TRACE

COORDINATOR_LOCK = ".coordinator.lock"
WRITER_LOCK = ".writer.lock"
GENERATION = "generation.json"
DONE = "DONE"
FAILED = "FAILED"
PAGE = "page.html"
FILES = "files"  # a folder, for files of the job's own
SINKS = ("tensorboard", "mlflow", "wandb")  # folders of the sinks
SHARDS = "shards"  # a folder with one of each checkpoint that has shards, called as the checkpoint
CHECKPOINT_LOST = "checkpoint_lost"  # in DONE, if the last checkpoint could not be written
OF_A_RUN = (DONE, FAILED, HISTORY, SUMMARY, PAGE, TRACE, FILES, SHARDS, *SINKS)
PARTS = ("world", "curve", "throughput", "result", "settings", "restarts", "ranks_lost")  # of a summary: objects
BUDGET = TypeAdapter(Budget)
NAME = re.compile(r"checkpoint-(\d{1,15})-(\d{1,15})\.pt")  # of a checkpoint: generation and step
MOST = 10**15  # of a generation's number


@dataclass(frozen=True)
class Persisted:
    """The newest generation's number and members; number 0 if there was none.

    `node` names the rank 0 of a run under way; empty if the run ended in order, finished or drained. `budget` is
    what it had spent without progress.
    """

    number: int = 0
    job: str = ""
    members: tuple[Key, ...] = ()
    node: str = ""
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class Failed:
    """Why a run failed for good, its exit code, and when (Unix seconds); `settings` is the digest of those it had."""

    reason: str
    code: int
    settings: str
    when: float


_FAILED, _SUMMARY = TypeAdapter(Failed), TypeAdapter(dict[str, Any])
T = TypeVar("T")


def read_generation(directory: Path) -> Persisted:
    """The last `write_generation`, with a number no lower than those in the checkpoints' names: numbers never repeat.

    Raises UsageError if the file cannot be read, or is damaged.
    """
    path = directory / GENERATION
    try:
        names = (NAME.fullmatch(entry.name) for entry in directory.iterdir())
        greatest = max((int(match.group(1)) for match in names if match), default=0)
        if not path.exists():
            return Persisted(greatest)
        read = json.loads(path.read_text())
        if type(read["number"]) is not int or not 0 <= read["number"] < MOST:
            raise ValueError
        members = tuple((str(role), int(ordinal)) for role, ordinal in read["members"])
        budget = BUDGET.validate_python(read.get("budget", {}))
        return Persisted(max(read["number"], greatest), str(read["job"]), members, str(read.get("node", "")), budget)
    except FileNotFoundError:
        return Persisted()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f'{path}: is damaged; write {{"number": N, "job": ..., "members": []}} to it, '
            "with N at least the greatest first number in the checkpoints' names"
        ) from error


def write_generation(directory: Path, persisted: Persisted) -> None:
    """Writes generation.json, even to a full disk that holds an earlier one. Raises OSError."""
    path, content = directory / GENERATION, json.dumps(asdict(persisted)).encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with path.open("r+b") as file:  # a full disk: this file's own blocks are still there
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def read_summary(directory: Path) -> dict[str, Any] | None:
    """The run's summary; None if there is none, or it is damaged. Raises OSError if it cannot be read."""
    try:
        summary = parse((directory / SUMMARY).read_text())
    except (FileNotFoundError, ValueError):
        return None
    is_one = isinstance(summary, dict) and all(isinstance(summary.get(part, {}), dict) for part in PARTS)
    return summary if is_one else None


def parse(text: str) -> Any:
    """JSON whose numbers are finite, and fit into a float. Raises ValueError for anything else."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def read_done(directory: Path) -> dict[str, Any] | None:
    """The summary of the finished job, or None if it has not finished. Raises UsageError for a damaged file."""
    return _read(directory / DONE, _SUMMARY)


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError:
        raise UsageError(f"{path}: is damaged; delete it to train on from the newest checkpoint") from None


def write_done(directory: Path, summary: dict[str, Any]) -> None:
    """Writes DONE. Raises OSError."""
    write_atomically(directory / DONE, json.dumps(summary, indent=1).encode() + b"\n")


def read_failed(directory: Path) -> Failed | None:
    """How the run failed for good, or None if it has not. Raises UsageError for a damaged file."""
    return _read(directory / FAILED, _FAILED)


def write_failed(directory: Path, failed: Failed) -> None:
    """Writes FAILED. Raises OSError."""
    write_atomically(directory / FAILED, json.dumps(asdict(failed), indent=1).encode() + b"\n")


def forget_failed(directory: Path) -> None:
    """Deletes FAILED. Raises UsageError if that is not possible."""
    with UsageError.wrap(f"{directory / FAILED}: cannot be deleted", OSError):
        (directory / FAILED).unlink(missing_ok=True)


def saved(directory: Path) -> list[tuple[int, int]]:
    """Generation and step of each checkpoint, by the files' names."""
    names = (NAME.fullmatch(entry.name) for entry in directory.iterdir())
    return [(int(match.group(1)), int(match.group(2))) for match in names if match]


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint, by the files' names; 0 if there is none."""
    return max(saved(directory), default=(0, 0))[1]


def set_aside(directory: Path, number: int, timeout: float) -> Path | None:
    """Moves an earlier run's files to a directory of their own, and returns that; None if there are none.

    `number` is the earlier run's newest generation. After an interruption, the next call moves the rest. Waits
    `timeout` seconds for a worker that still writes. Raises UsageError if it does not end, or files cannot be moved.
    """
    writer = lock(directory, WRITER_LOCK, timeout)
    aside = directory / f"earlier-{number:06d}"
    try:
        files = [path for path in directory.iterdir() if path.name in OF_A_RUN or NAME.fullmatch(path.name)]
        if not files:
            return None
        aside.mkdir(exist_ok=True)
        for path in files:
            path.replace(aside / path.name)
        sync_directory(aside)
        sync_directory(directory)
    except OSError as error:
        raise UsageError(f"RESUME=0: files of CHECKPOINT_DIR={directory} cannot be moved ({error.strerror})") from error
    finally:
        writer.release()
    return aside


def prune_shards(directory: Path, kept: Collection[str]) -> None:
    """Deletes the shards of checkpoints that are not `kept`: deleted ones, and those that a writer left unfinished."""
    with contextlib.suppress(OSError):
        for folder in (directory / SHARDS).iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


class TakenError(UsageError):
    """Another process holds the lock."""


def lock(directory: Path, name: str, timeout: float, variable: str = "CHECKPOINT_DIR") -> FileLock:
    """Makes `directory`, which `variable` names, and locks its file `name` until this process ends, or `release`.

    Raises TakenError if another process holds it for `timeout` seconds, UsageError if it cannot be written.
    """
    # flock or nothing: a lock of another kind would outlast a killed process
    lock = FileLock(directory / name, timeout, thread_local=False, poll_interval=0.02, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = "is in use by another running job; give each its own directory"
        raise TakenError(f"{variable}={directory}: {problem}") from None
    except OSError as error:
        raise UsageError(f"{variable}={directory}: cannot be written ({error.strerror})") from error
    return lock
