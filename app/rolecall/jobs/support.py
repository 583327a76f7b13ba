"""What the jobs of Rolecall share, and no job of a user's needs: progress, a disk cache, devices, seeds, free memory,
packages, packed floats, the standard library.

The only module of the jobs that imports more of Rolecall than its public API.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rolecall.context.context import choose_device, seed_generators
from rolecall.context.memory import keep_freed_memory
from rolecall.context.progress_bar import progress, track
from rolecall.declare.loader import explain
from rolecall.machine import free_memory, require_packages
from rolecall.weights.packing import pack, unpack

__all__ = [
    "cached",
    "choose_device",
    "explain",
    "free_memory",
    "keep_freed_memory",
    "pack",
    "progress",
    "require_packages",
    "seed_generators",
    "standard_library",
    "track",
    "unpack",
    "versions",
]

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
MAX_CACHE_BYTES = 2**28  # in a container, the temporary directory is memory
T = TypeVar("T")


def cached(function: Callable[..., T], ignore: Sequence[str]) -> Callable[..., T]:
    """`function` with its results cached on disk, for other processes of this user. The arguments that `ignore` names
    are not part of the key. Without a directory that only this user can write, nothing is cached, because a cached
    file runs code when it is read.
    """
    joblib: Any = importlib.import_module("joblib")  # it has no types
    directory = Path(tempfile.gettempdir()) / f"rolecall-cache-{os.getuid()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            memory = joblib.Memory(directory, verbose=0)
            memory.reduce_size(bytes_limit=MAX_CACHE_BYTES)
            result: Callable[..., T] = memory.cache(function, ignore=[*ignore])
            return result
    return function


def versions(files: Iterable[Path]) -> str:
    """A digest of the names, sizes and times of `files`, for a key of `cached`. Raises OSError."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def standard_library() -> tuple[Path, list[Path]]:
    """The folder of Python's standard library, and the sorted files of its modules without their tests."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return root, sorted(files)
