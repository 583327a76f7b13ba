"""A job that a user starts in a directory with modules of the same names as ours, and of the standard library's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import commands
from tests.integration.cluster import DEADLINE, QUICK, ROOT, reported

OURS = ("errors.py", "config.py", "telemetry.py", "jobs/__init__.py", "gang/__init__.py", "declare/__init__.py")
LIBRARIES = ("queue.py", "platform.py", "filelock.py", "structlog/__init__.py")  # which ranks import


def test_the_users_modules_replace_none_of_ours(tmp_path: Path) -> None:
    """The command `rolecall`, like -P, does not have the working directory on its path. In the ranks, libraries come
    before the user's modules, which can be imported all the same.
    """
    for name in (*OURS, *LIBRARIES):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError('{name} of the working directory is imported')\n")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def data():\n"
        "    samples = torch.utils.data.TensorDataset(torch.randn(64, 1, 28, 28), torch.arange(64) % 10)\n"
        "    return samples, samples\n"
    )
    environment = {**os.environ, **QUICK, "CHECKPOINT_DIR": "run-of-mine", "PYTHONPATH": str(ROOT / "app")}
    flags = ["--epochs", "1", "--trainers", "1", "--dataset", "mine:data", "--plain"]
    ended = commands.run(
        [sys.executable, "-P", "-m", "rolecall", "run", "ps", *flags],
        env=environment,
        cwd=tmp_path,
        timeout=2 * DEADLINE,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "working directory is imported" not in ended.stdout + ended.stderr
    summary, _ = reported(tmp_path / "run-of-mine")
    assert (summary["state"], summary["settings"]["DATASET"]) == ("finished", "mine:data")
