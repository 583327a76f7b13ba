"""The files beside a run's checkpoints: the newest generation's number, DONE, FAILED, the report's names, the locks."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from filelock import FileLock, Timeout
from msgspec import Meta

from rolecall import config
from rolecall.errors import UsageError
from rolecall.gang.protocol import Budget, Key
from rolecall.record.files import HISTORY as HISTORY
from rolecall.record.files import SUMMARY as SUMMARY
from rolecall.record.files import sync_directory as sync_directory
from rolecall.record.files import using as using
from rolecall.record.files import write_atomically as write_atomically
from rolecall.record.records import FOLDER as TRACE

RUNS = Path("runs")  # where runs without a CHECKPOINT_DIR are
A_RUN = "a run's name or folder"  # what commands take
RUN_NAME = re.compile(r"(?!\d+$)[a-zA-Z0-9][\w.-]{0,62}", re.ASCII)
COORDINATOR_LOCK = ".coordinator.lock"
WRITER_LOCK = ".writer.lock"
LOCKS = (COORDINATOR_LOCK, WRITER_LOCK)
GENERATION = "generation.json"
DONE = "DONE"
FAILED = "FAILED"
PAGE = "page.html"
OUTPUT = "output.log"  # what `rolecall run --plain` prints, if the run is detached
FILES = "files"  # a folder, for files of the job's own
SINKS = ("tensorboard", "mlflow", "wandb")  # folders of the sinks
COPIES = "copies"  # a folder, for copies of a run's checkpoints that a member holds
NEWEST = "newest.json"  # in it: the newest generation, and the newest checkpoint that was held anywhere, and by whom
SHARDS = "shards"  # a folder with one of each checkpoint that has shards, called as the checkpoint
CHECKPOINT_LOST = "checkpoint_lost"  # in DONE, if the last checkpoint could not be written
OF_A_RUN = (DONE, FAILED, HISTORY, SUMMARY, PAGE, TRACE, FILES, SHARDS, *SINKS)
PARTS = ("world", "curve", "throughput", "result", "settings", "restarts", "ranks_lost")  # of a summary: objects
NAME = re.compile(r"checkpoint-(\d{1,15})-(\d{1,15})\.pt")  # of a checkpoint: generation and step
MOST = 10**15  # of a generation's number
T = TypeVar("T")


@dataclass(frozen=True)
class Persisted:
    """The newest generation's number and members; number 0 if there was none.

    `node` names the rank 0 of a run under way; empty if the run ended in order, finished or drained. `budget` is
    what it had spent without progress.
    """

    number: Annotated[int, Meta(ge=0, lt=MOST)]
    job: str
    members: tuple[Key, ...]
    node: str = ""
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class Failed:
    """Why a run failed for good, its exit code, and when (Unix seconds); `settings` is the digest of those it had."""

    reason: str
    code: int
    settings: str
    when: float


def read_generation(directory: Path) -> Persisted:
    """The last `write_generation`, with a number no lower than those in the checkpoints' names: numbers never repeat.

    Raises UsageError if the file cannot be read, or is damaged.
    """
    advice = 'write {"number": N, "job": ..., "members": []} to it, with N at least the greatest first number in the '
    persisted = _read(directory / GENERATION, Persisted, f"{advice}checkpoints' names") or Persisted(0, "", ())
    try:
        greatest = max(saved(directory), default=(0, 0))[0]
    except FileNotFoundError:
        return persisted
    except OSError as error:
        raise UsageError(f"{directory}: cannot be read ({error.strerror})") from error
    return replace(persisted, number=max(persisted.number, greatest))


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
        content = (directory / SUMMARY).read_bytes()
        summary = json.loads(content, parse_float=_number, parse_constant=_number, parse_int=_number)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    is_one = isinstance(summary, dict) and all(isinstance(summary.get(part, {}), dict) for part in PARTS)
    return summary if is_one else None


def _number(text: str) -> float:
    """A number that is finite, and fits into a float. Raises ValueError for another one."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return int(text) if text.lstrip("-").isdecimal() else value


def read_done(directory: Path) -> dict[str, Any] | None:
    """The summary of the finished job, or None if it has not finished. Raises UsageError for a damaged file."""
    return _read(directory / DONE, dict[str, Any])


def _read(path: Path, kind: type[T], advice: str = "delete it to train on from the newest checkpoint") -> T | None:
    try:
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is damaged; {advice}") from None


def write_done(directory: Path, summary: dict[str, Any]) -> None:
    """Writes DONE. Raises OSError."""
    write_atomically(directory / DONE, json.dumps(summary, indent=1).encode() + b"\n")


def read_failed(directory: Path) -> Failed | None:
    """How the run failed for good, or None if it has not. Raises UsageError for a damaged file."""
    return _read(directory / FAILED, Failed)


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


def newest_copied(directory: Path) -> int:
    """The greatest generation that is known, or of which there is a checkpoint, in the copies beneath `directory`; 0 if
    there are none."""
    folder, known = directory / COPIES, 0
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = msgspec.json.decode((folder / NEWEST).read_bytes(), type=tuple[int, Any, Any])[0]
    with contextlib.suppress(OSError):
        known = max((known, *(generation for generation, _ in saved(folder))))
    return known


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


def prune_shards(directory: Path, kept: Collection[str], dropped: Collection[str] = ()) -> None:
    """Deletes the shards of the checkpoints `dropped`, and those that a writer left unfinished beside the checkpoints
    `kept`. Older ones stay: their checkpoints may have been moved away, and come back.
    """
    with contextlib.suppress(OSError):
        for folder in (directory / SHARDS).iterdir():
            if folder.name not in kept and (folder.name in dropped or folder.name > min(kept, default="~")):
                shutil.rmtree(folder, ignore_errors=True)


class TakenError(UsageError):
    """Another run is at work in `directory`, which `variable` names."""

    def __init__(self, directory: Path, variable: str = "CHECKPOINT_DIR") -> None:
        super().__init__(f"{variable}={directory}: is in use by another running job; give each its own directory")


def of_run(job: str) -> Path:
    """The directory of a run of `job` that begins now, without a CHECKPOINT_DIR."""
    return RUNS / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def named(name: str, is_given: bool) -> Path:
    """The directory of the run `name`. Raises UsageError for what is no name, and if CHECKPOINT_DIR `is_given` too."""
    if not RUN_NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: must be up to 63 letters, digits, '_', '-' and '.', begin with a letter or a digit, and "
            "not be a number"
        )
    if is_given or config.exported("CHECKPOINT_DIR"):
        raise UsageError(f"--name {name}: is the folder {RUNS / name}; leave CHECKPOINT_DIR out")
    return RUNS / name


def find(run: str) -> Path:
    """The directory of the run that a command names by its folder, or else by its name. A folder that holds no run, as
    `rolecall new` makes one, is not meant if there is a run of that name."""
    folder, of_name = Path(run), RUNS / run
    with contextlib.suppress(OSError):  # too long a name
        if "/" not in run and run[:1] not in ("", ".") and of_name.is_dir() and not (folder / "logs").is_dir():
            return of_name
    return folder


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
        raise TakenError(directory, variable) from None
    except OSError as error:
        raise UsageError(f"{variable}={directory}: cannot be written ({error.strerror})") from error
    return lock
