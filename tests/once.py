"""What is made once for all of a run's test processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name`, which `make` has filled in whichever process came first."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            fresh = folder.with_suffix(".new")
            fresh.mkdir()
            make(fresh)
            fresh.rename(folder)
    return folder
