"""Checks of directories: CHECKPOINT_DIR with its locks and its newest checkpoint, TMPDIR, shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rolecall import config
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import CheckpointError
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason, shown
from rolecall.record import rundir
from rolecall.tunnel import places

LITTLE = 100 * 2**20  # bytes free for a first checkpoint
LITTLE_TEMPORARY = 16 * 2**20
LITTLE_SHARED = 16 * 2**20
LONGEST_SOCKET = 107  # bytes of a Unix socket's path: unix(7)
BLOCK = 2**20
ELSEWHERE = "only rank 0, and ranks that write shares of their own, use CHECKPOINT_DIR"


def directory(patient: Patient) -> Finding:
    """Whether CHECKPOINT_DIR can be written."""
    path = patient.settings.checkpoint_dir
    if not path.exists():
        if not patient.first:
            return unchecked(f"{path} does not exist; {ELSEWHERE}")
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            return problem(f"CHECKPOINT_DIR={path} does not exist, and cannot be made in {parent}")
        return ok(f"CHECKPOINT_DIR={path} does not exist yet, and can be made")
    if error := try_writing(path):
        text = f"CHECKPOINT_DIR={path} cannot be written ({reason(error)})"
        if patient.first or patient.settings.checkpoint_shards == "direct":
            return problem(text)
        return unchecked(f"{text}; {ELSEWHERE}")
    return ok(f"CHECKPOINT_DIR={path} can be written")


def try_writing(path: Path) -> OSError | None:
    """Why no file can be written in a directory; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:  # without a name, where the file system has such
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def space(patient: Patient) -> Finding:
    """Free space against what the next checkpoint takes."""
    path = patient.settings.checkpoint_dir
    if not path.is_dir():
        return unchecked(f"{path} does not exist")
    free, size = shutil.disk_usage(path).free, _newest_size(path)
    if not size:
        text = f"{shown(free)} are free; there is no checkpoint yet"
        return warning(text) if free < LITTLE else ok(text)
    text = f"{shown(free)} are free; the newest checkpoint has {shown(size)}"
    if free < size:
        return problem(text) if patient.first else warning(text)
    return warning(text) if free < 2 * size else ok(text)


def _newest_size(path: Path) -> int:
    """Bytes of the newest checkpoint, with its shards; 0 where there is none."""
    for newest in checkpoint.newest_first(path):
        shards = path / rundir.SHARDS / newest.stem
        with contextlib.suppress(FileNotFoundError):  # rank 0 has replaced it by a newer one
            return sum(file.stat().st_size for file in (newest, *(shards.iterdir() if shards.is_dir() else ())))
    return 0


def locks(patient: Patient) -> Finding:
    """Who holds the locks of CHECKPOINT_DIR."""
    path = patient.settings.checkpoint_dir
    if not patient.first:
        return unchecked("rank 0's processes hold them, not this rank's")
    held = {name: holder(patient, path / name) for name in (rundir.COORDINATOR_LOCK, rundir.WRITER_LOCK)}
    by = ", ".join(f"{name} by {who}" for name, who in held.items() if who)
    if not by:
        return ok("nobody holds the locks of CHECKPOINT_DIR")
    if patient.runs:
        return ok(f"this rank runs, and holds them ({by})")
    return problem(f"they are held, though this rank does not run: {by}")


def holder(patient: Patient, path: Path) -> str:
    """The process that holds a lock, in words; empty where nobody does."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # at once undone: who starts meanwhile waits for it
            except BlockingIOError:
                return _process(_holder_of(patient, status))
    except OSError:  # there is none, or it cannot be read
        return ""
    return ""


def _holder_of(patient: Patient, status: os.stat_result) -> int:
    """The process that the kernel lists for a locked file; 0 where it lists none that is seen here."""
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in (patient.proc / "locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place:
                return int(fields[4])
    return 0


def _process(number: int) -> str:
    with contextlib.suppress(psutil.Error):
        if number > 0:
            return f"process {number} ({psutil.Process(number).name()})"
    return "a process that is not seen from here"


def newest(patient: Patient) -> Finding:
    """Whether the newest checkpoint is intact."""
    path = patient.settings.checkpoint_dir
    files = checkpoint.newest_first(path)
    if not files:
        return unchecked(f"there is no checkpoint in {path}")
    if not patient.job_name:
        return unchecked("JOB is not known")
    begun = time.monotonic()
    try:
        shards = list(_intact(files[0], patient.job_name, begun + patient.timeout))
    except CheckpointError as error:
        if not files[0].exists() and checkpoint.newest_first(path)[:1] not in ([], files[:1]):
            return newest(patient)  # rank 0 has replaced it by a newer one
        return problem(str(error))
    except TimeoutError:
        size = shown(files[0].stat().st_size)
        return unchecked(f"{files[0].name} has {size}: reading it takes over {patient.timeout:g} s (--timeout)")
    beside = f", and {sum(shards)} of its {len(shards)} shards are here" if shards else ""
    return ok(f"{files[0].name} is intact{beside}")


def _intact(path: Path, job: str, end: float) -> Iterator[bool]:
    """Reads a checkpoint until `end` (monotonic seconds), block by block. Yields for each shard whether its file is
    here. Raises CheckpointError and TimeoutError."""
    try:
        with path.open("rb") as file:
            head = checkpoint.read_head(path, file)
            checkpoint.require_readable(path, head, job)
            begin, length = file.tell(), path.stat().st_size - file.tell()
            if length != head["length"]:
                raise CheckpointError(f"{path.name} is torn: {length} bytes of {head['length']}")
            if checkpoint.digest_of(head, _blocks(file, end)) != head["sha256"]:
                raise CheckpointError(f"{path.name} is corrupt: its checksum does not match")
            file.seek(begin + length - head.get("manifest", 0))
            manifest = json.loads(file.read() or b"{}")
        for one in (one for files in manifest.values() for one in files):
            shard = path.parent / rundir.SHARDS / path.stem / str(one["name"])
            if shard.exists() and shard.stat().st_size != one["length"]:
                raise CheckpointError(f"{path.name}: its shard {shard.name} is torn")
            yield shard.exists()
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        raise CheckpointError(f"{path.name} cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be loaded: its list of shards is damaged") from error


def _blocks(file: Iterator[bytes], end: float) -> Iterator[bytes]:
    while block := file.read(BLOCK):  # type: ignore[attr-defined]
        if time.monotonic() > end:
            raise TimeoutError
        yield block


def temporary(patient: Patient) -> Finding:
    """TMPDIR, in which the rank's sockets and its worker's metrics lie."""
    given = config.exported("TMPDIR")
    try:
        path = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return problem("no temporary directory can be written: neither TMPDIR nor /tmp")
    if given and Path(given).absolute() != path.absolute():
        return warning(f"TMPDIR={given} cannot be used, so {path} is", "make that directory, or correct TMPDIR")
    if error := try_writing(path):
        return problem(f"{path} cannot be written ({reason(error)})")
    longest = path.absolute() / "rolecall-12345678" / places.COORDINATOR
    if len(os.fsencode(longest)) > LONGEST_SOCKET:
        return problem(f"{path} is too long for a socket's path, which has at most {LONGEST_SOCKET} bytes",
                       "name a shorter TMPDIR")  # fmt: skip
    free = shutil.disk_usage(path).free
    text = f"{path} can be written; {shown(free)} are free"
    return warning(text) if free < LITTLE_TEMPORARY else ok(text)


def shared(patient: Patient) -> Finding:
    """Shared memory, which data loaders and environments in processes of their own use."""
    path = patient.shared_memory
    if not path.is_dir():
        return warning(f"there is no {path}")
    usage = shutil.disk_usage(path)
    text = f"{path}: {shown(usage.free)} of {shown(usage.total)} are free"
    if not os.access(path, os.W_OK):
        return warning(f"{path} cannot be written")
    return warning(text) if usage.free < LITTLE_SHARED else ok(text)


CHECKS = (
    Check(
        "checkpoint directory",
        "whether CHECKPOINT_DIR exists or can be made, and a file can be written and synced there",
        "mount it writable for this user (of the image: 10001), or name another CHECKPOINT_DIR",
        directory,
    ),
    Check(
        "free space",
        "what is free there, against the newest checkpoint's size with its shards",
        "free some space or enlarge the volume: a new checkpoint is written before an old one is deleted",
        space,
    ),
    Check(
        "locks",
        "at rank 0: which processes hold the coordinator's and the writer's lock",
        "give each run its own CHECKPOINT_DIR, or end that process",
        locks,
    ),
    Check(
        "newest checkpoint",
        "its first line, its length, its checksum, and its shards' lengths",
        "copy it away to examine it: the one before it is used; if there is none, see docs/runbook.md",
        newest,
    ),
    Check(
        "TMPDIR",
        "whether it can be written, its free space, and whether a socket's path fits in it",
        "free some space there, or name another TMPDIR",
        temporary,
    ),
    Check(
        "shared memory",
        "the size of `/dev/shm`, which data loaders and environments in processes of their own need; ranks do not",
        "give the container more (`--shm-size`, `shm_size`, or an `emptyDir` of medium `Memory` at `/dev/shm`)",
        shared,
    ),
)
