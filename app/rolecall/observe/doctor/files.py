"""Checks of directories: CHECKPOINT_DIR, the space there, TMPDIR."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from rich.filesize import decimal

from rolecall import config
from rolecall.checkpoint import checkpoint
from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, unchecked, warning
from rolecall.observe.doctor.subject import Subject
from rolecall.record import rundir
from rolecall.tunnel import places

MIN_FREE_BYTES = 100 * 2**20  # for a first checkpoint
MIN_FREE_TMP_BYTES = 16 * 2**20
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path: unix(7)
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
        if subject.is_rank0:
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


@check("TMPDIR", "free some space there, or name another TMPDIR")
def temporary(subject: Subject) -> Finding:
    """Whether it can be written, its free space, and whether a socket's path fits in it."""
    path = Path(config.exported("TMPDIR") or "/tmp")
    if error := write_error(path):
        return problem(f"{path} cannot be written ({reason(error)})")
    if len(os.fsencode(path.absolute() / "rolecall-1234567-12345678" / places.COORDINATOR)) > MAX_SOCKET_PATH:
        text = f"{path} is too long for a socket's path, which has at most {MAX_SOCKET_PATH} bytes"
        return problem(text, "name a shorter TMPDIR")
    free = shutil.disk_usage(path).free
    text = f"{path} can be written; {decimal(free)} are free"
    return warning(text) if free < MIN_FREE_TMP_BYTES else ok(text)


CHECKS = (directory, space, temporary)
