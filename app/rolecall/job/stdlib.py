"""The source of the Python standard library that runs this program: text that is there without a download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

# the standard library's own, but not what it is tested with
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def root() -> Path:
    """Where it lies."""
    return Path(sysconfig.get_path("stdlib"))


def sources() -> list[Path]:
    """Its modules' files, sorted."""
    found = []
    for directory, below, names in os.walk(root()):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found)
