"""Programs that tests run to their end, and modules that they import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 60.0  # a fail-safe


def run(
    command: Sequence[str | Path], cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = DEADLINE
) -> subprocess.CompletedProcess[str]:
    """The exit code and the outputs of `command`. Raises TimeoutExpired after `timeout` seconds."""
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False)


def stand_in(folder: Path, *names: str, script: str) -> dict[str, str]:
    """Makes programs called `names` in `folder`. Returns the environment in which they come before the machine's."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def forget_modules(before: set[str], folder: Path) -> None:
    """Forgets modules of `folder` that were not imported `before`. Others stay: an extension may abort the process if
    it is imported twice."""
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or folder in Path(file).parents:
            del sys.modules[name]
