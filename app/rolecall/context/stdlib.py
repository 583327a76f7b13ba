"""The source of the Python standard library that runs this program: text that needs no download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def standard_library() -> tuple[Path, list[Path]]:
    """Its folder, and the files of its modules without their tests, sorted."""
    root, files = Path(sysconfig.get_path("stdlib")), list[Path]()
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return root, sorted(files)
