"""The files of a run's report, and how files are written whole. It imports little, for the picture's process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

HISTORY = "history.jsonl"
SUMMARY = "summary.json"
CURVE = "curve.png"


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Writes `parts` to a file that after a crash at any moment is either complete or as it was. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if temporary.is_symlink():  # in a directory from elsewhere: nothing is written outside of it
            temporary.unlink()
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the write's own error says more
            temporary.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Has the names in `directory` on disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
