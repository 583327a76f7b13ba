"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 60.0  # a fail-safe


def run(
    command: Sequence[str | Path], cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = DEADLINE
) -> subprocess.CompletedProcess[str]:
    """The exit code and the outputs of `command`. Raises TimeoutExpired after `timeout` seconds."""
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False)
