"""Checks of directories: CHECKPOINT_DIR with its locks and its newest checkpoint, TMPDIR, shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
from rich.filesize import decimal

from rolecall import config
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import CheckpointError
from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, unchecked, warning
from rolecall.observe.doctor.subject import Subject
from rolecall.record import rundir
from rolecall.tunnel import places

MIN_FREE_BYTES = 100 * 2**20  # for a first checkpoint
MIN_FREE_TMP_BYTES = MIN_FREE_SHM_BYTES = 16 * 2**20
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path: unix(7)
BLOCK_BYTES = 2**20
ELSEWHERE = "only rank 0, and ranks that write shards themselves, use CHECKPOINT_DIR"


@check(
    "checkpoint directory",
    "mount it writable for this user (of the image: 10001), or name another CHECKPOINT_DIR",
)
def directory(subject: Subject) -> Finding:
    """Whether CHECKPOINT_DIR exists or can be made, and a file can be written and synced there."""
    path = subject.settings.checkpoint_dir
    if not path.exists():
        if not subject.is_rank0:
            return unchecked(f"{path} does not exist; {ELSEWHERE}")
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            return problem(f"CHECKPOINT_DIR={path} does not exist, and cannot be made in {parent}")
        return ok(f"CHECKPOINT_DIR={path} does not exist yet, and can be made")
    if error := write_error(path):
        text = f"CHECKPOINT_DIR={path} cannot be written ({reason(error)})"
        if subject.is_rank0 or subject.settings.checkpoint_shards == "direct":
            return problem(text)
        return unchecked(f"{text}; {ELSEWHERE}")
    return ok(f"CHECKPOINT_DIR={path} can be written")


def write_error(path: Path) -> OSError | None:
    """Why no file can be written in a directory; None if one can."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


@check(
    "free space",
    "free some space or enlarge the volume: a new checkpoint is written before an old one is deleted",
)
def space(subject: Subject) -> Finding:
    """What is free there, against the newest checkpoint's size with its shards."""
    path = subject.settings.checkpoint_dir
    if not path.is_dir():
        return unchecked(f"{path} does not exist")
    free, size = shutil.disk_usage(path).free, 0
    for newest in checkpoint.newest_first(path)[:1]:
        shards = path / rundir.SHARDS / newest.stem
        with contextlib.suppress(FileNotFoundError):  # rank 0 has replaced it
            size = sum(file.stat().st_size for file in (newest, *(shards.iterdir() if shards.is_dir() else ())))
    if not size:
        text = f"{decimal(free)} are free; there is no checkpoint yet"
        return warning(text) if free < MIN_FREE_BYTES else ok(text)
    text = f"{decimal(free)} are free; the newest checkpoint has {decimal(size)}"
    if free < size:
        return problem(text) if subject.is_rank0 else warning(text)
    return warning(text) if free < 2 * size else ok(text)


@check("locks", "give each run its own CHECKPOINT_DIR, or end that process")
def locks(subject: Subject) -> Finding:
    """At rank 0: which processes hold the coordinator's and the writer's lock."""
    path = subject.settings.checkpoint_dir
    if not subject.is_rank0:
        return unchecked("rank 0's processes hold them, not this rank's")
    held = {name: _holder(path / name, subject.proc) for name in (rundir.COORDINATOR_LOCK, rundir.WRITER_LOCK)}
    by = ", ".join(f"{name} by {process}" for name, process in held.items() if process)
    if not by:
        return ok("no process holds the locks of CHECKPOINT_DIR")
    if subject.runs:
        return ok(f"this rank runs, and holds them ({by})")
    return problem(f"they are held, though this rank does not run: {by}")


def _holder(path: Path, proc: Path) -> str:
    """The process that holds a lock; empty if none does."""
    with contextlib.suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
        except BlockingIOError:
            status = os.fstat(file.fileno())
            inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            with contextlib.suppress(OSError, psutil.Error):
                for fields in map(str.split, (proc / "locks").read_text().splitlines()):
                    if fields[1] == "FLOCK" and fields[5] == inode and int(fields[4]) > 0:
                        return f"process {fields[4]} ({psutil.Process(int(fields[4])).name()})"
            return "a process that is not visible here"
    return ""


@check(
    "newest checkpoint",
    "move it away to examine it: the one before it is used; if there is none, see docs/runbook.md",
)
def newest(subject: Subject) -> Finding:
    """Its first line, its length, and its checksum."""
    path = subject.settings.checkpoint_dir
    files = checkpoint.newest_first(path)
    if not files:
        return unchecked(f"there is no checkpoint in {path}")
    try:
        _verify(files[0], subject.job.name, time.monotonic() + subject.timeout)
    except CheckpointError as error:
        if not files[0].exists():
            return unchecked("rank 0 has just replaced it")
        return problem(str(error))
    except TimeoutError:
        size = decimal(files[0].stat().st_size)
        return unchecked(f"{files[0].name} has {size}: reading it takes over {subject.timeout:g} s (--timeout)")
    return ok(f"{files[0].name} is intact")


def _verify(path: Path, job: str, end: float) -> None:
    """Reads a checkpoint until `end` (monotonic seconds). Raises CheckpointError and TimeoutError."""
    try:
        with path.open("rb") as file:
            head = checkpoint.read_head(path, file)
            checkpoint.require_readable(path, head, job)
            length = path.stat().st_size - file.tell()
            if length != head["length"]:
                raise CheckpointError(f"{path.name} is torn: {length} bytes of {head['length']}")
            if checkpoint.digest_of(head, _blocks(file, end)) != head["sha256"]:
                raise CheckpointError(f"{path.name} is corrupt: its checksum does not match")
    except TimeoutError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {reason(error)}") from error


def _blocks(file: IO[bytes], end: float) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        if time.monotonic() > end:
            raise TimeoutError
        yield block


@check("TMPDIR", "free some space there, or name another TMPDIR")
def temporary(subject: Subject) -> Finding:
    """Whether it can be written, its free space, and whether a socket's path fits in it."""
    given = config.exported("TMPDIR")
    try:
        path = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return problem("no temporary directory can be written: neither TMPDIR nor /tmp")
    if given and Path(given).absolute() != path.absolute():
        return warning(f"TMPDIR={given} cannot be used, so {path} is", "make that directory, or correct TMPDIR")
    if error := write_error(path):
        return problem(f"{path} cannot be written ({reason(error)})")
    if len(os.fsencode(path.absolute() / "rolecall-12345678" / places.COORDINATOR)) > MAX_SOCKET_PATH:
        text = f"{path} is too long for a socket's path, which has at most {MAX_SOCKET_PATH} bytes"
        return problem(text, "name a shorter TMPDIR")
    free = shutil.disk_usage(path).free
    text = f"{path} can be written; {decimal(free)} are free"
    return warning(text) if free < MIN_FREE_TMP_BYTES else ok(text)


@check(
    "shared memory",
    "give the container more (`--shm-size`, `shm_size`, or an `emptyDir` of medium `Memory` at `/dev/shm`)",
)
def shared(subject: Subject) -> Finding:
    """The size of `/dev/shm`, which data loaders and environments in processes of their own need; ranks do not."""
    path = subject.shared_memory
    if not path.is_dir():
        return warning(f"there is no {path}")
    if not os.access(path, os.W_OK):
        return warning(f"{path} cannot be written")
    usage = shutil.disk_usage(path)
    text = f"{path}: {decimal(usage.free)} of {decimal(usage.total)} are free"
    return warning(text) if usage.free < MIN_FREE_SHM_BYTES else ok(text)


CHECKS = (directory, space, locks, newest, temporary, shared)
