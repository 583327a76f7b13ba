"""What lies beside a run's checkpoints: the newest generation's number, DONE, the report, the locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rolecall.config import UsageError
from rolecall.gang.protocol import Key

COORDINATOR_LOCK = ".coordinator.lock"
WRITER_LOCK = ".writer.lock"
GENERATION = "generation.json"
DONE = "DONE"
HISTORY = "history.jsonl"
SUMMARY = "summary.json"
CURVE = "curve.png"
OF_A_RUN = (DONE, HISTORY, SUMMARY, CURVE)
NAME = re.compile(r"checkpoint-(\d+)-(\d+)\.pt")  # of a checkpoint: generation and step


@dataclass(frozen=True)
class Persisted:
    """The newest generation's number and members; number 0 where there was none.

    `node` is the rank 0 in the middle of the run; empty where the run ended in order, finished or drained.
    """

    number: int = 0
    job: str = ""
    members: tuple[Key, ...] = ()
    node: str = ""


def read_generation(directory: Path) -> Persisted:
    """What `write_generation` wrote last, and no number below one in the checkpoints' names: numbers never repeat.

    Raises UsageError where the file cannot be understood.
    """
    path = directory / GENERATION
    try:
        names = (NAME.fullmatch(found.name) for found in directory.iterdir())
        greatest = max((int(match.group(1)) for match in names if match), default=0)
        if not path.exists():
            return Persisted(greatest)
        read = json.loads(path.read_text())
        if type(read["number"]) is not int or read["number"] < 0:
            raise ValueError
        members = tuple((str(role), int(ordinal)) for role, ordinal in read["members"])
        return Persisted(max(read["number"], greatest), str(read["job"]), members, str(read.get("node", "")))
    except FileNotFoundError:
        return Persisted()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f'{path}: is damaged; write {{"number": N, "job": ..., "members": []}} to it, '
            "with N at least the greatest first number in the checkpoints' names"
        ) from error


def write_generation(directory: Path, persisted: Persisted) -> None:
    path, content = directory / GENERATION, json.dumps(asdict(persisted)).encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with path.open("r+b") as file:  # a full disk: but these blocks are there already
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def read_done(directory: Path) -> dict[str, Any] | None:
    """The summary of the finished job, or None where it has not finished. A damaged file is a UsageError."""
    path = directory / DONE
    try:
        summary = json.loads(path.read_text())
        if not isinstance(summary, dict):
            raise ValueError
        return summary
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError:
        raise UsageError(f"{path}: is damaged; delete it to train on from the newest checkpoint") from None


def write_done(directory: Path, summary: dict[str, Any]) -> None:
    write_atomically(directory / DONE, json.dumps(summary, indent=1).encode() + b"\n")


def set_aside(directory: Path, number: int, timeout: float) -> Path | None:
    """Move an earlier run's files to a directory of their own, and return that; None if there are none.

    `number` is the earlier run's newest generation. Interrupted, it goes on where it stopped when it is called again.
    Raises UsageError where a worker still writes, or files cannot be moved.
    """
    writer = lock(directory, WRITER_LOCK, timeout)
    aside = directory / f"earlier-{number:06d}"
    try:
        found = [path for path in directory.iterdir() if path.name in OF_A_RUN or NAME.fullmatch(path.name)]
        if not found:
            return None
        aside.mkdir(exist_ok=True)
        for path in found:
            path.replace(aside / path.name)
        _sync_directory(aside)
        _sync_directory(directory)
    except OSError as error:
        raise UsageError(f"RESUME=0: files of CHECKPOINT_DIR={directory} cannot be moved ({error.strerror})") from error
    finally:
        writer.release()
    return aside


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that after a crash at any moment it is either whole or as it was before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the write's own error says more
            temporary.unlink(missing_ok=True)
        raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TakenError(UsageError):
    """Another process holds the lock."""


class Lock:
    """An exclusive lock on a directory, held until the process ends or `release`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def release(self) -> None:
        self._file.close()


def lock(directory: Path, name: str, timeout: float, variable: str = "CHECKPOINT_DIR") -> Lock:
    """Make `directory`, which `variable` names, and lock its file `name`. Raises UsageError where it stays taken, or
    cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / name).open("ab")
    except OSError as error:
        raise UsageError(f"{variable}={directory}: cannot be written ({error.strerror})") from error
    for _ in _attempts(timeout):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Lock(file)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                file.close()
                raise UsageError(f"{variable}={directory}: cannot be locked ({error.strerror})") from error
    file.close()
    raise TakenError(f"{variable}={directory}: is in use by another running job; give each its own directory")


def _attempts(timeout: float) -> Iterator[None]:
    end = time.monotonic() + timeout
    yield
    while time.monotonic() < end:
        time.sleep(0.02)  # flock has no deadline of its own
        yield
