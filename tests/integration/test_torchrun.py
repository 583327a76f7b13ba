"""A job whose ranks torchrun starts: it says the place of each by its own variables."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rolecall.record import rundir
from tests import commands
from tests.integration.cluster import QUICK, TOKEN, reported

SHORT = {
    "OBSERVERS": "1",
    "MAX_ITERATIONS": "2",
    "SOLVED_BY": "never",
    "NUM_ENVS": "2",
    "ROLLOUT_STEPS": "8",
    "EPOCHS": "1",
}


def test_ranks_of_torchrun_are_a_run(tmp_path: Path) -> None:
    known = {
        name: value for name, value in os.environ.items() if name not in ("ROLE", "ORDINAL", "PORT", "METRICS_PORT")
    }
    with tempfile.TemporaryDirectory(prefix="rolecall-test-") as temporary:  # short, for the sockets in it
        settings = {"JOB": "rl", "JOB_TOKEN": TOKEN, "CHECKPOINT_DIR": str(tmp_path / "kept"), "TMPDIR": temporary}
        torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2"]
        environment = {**known, **QUICK, **SHORT, **settings}
        done = commands.run([*torchrun, "-m", "rolecall", "rank"], env=environment, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "members='agent_0, observer_0'" in done.stdout
    summary, _ = reported(tmp_path / "kept")
    assert summary["result"]["solved"] is False
    assert (tmp_path / "kept" / rundir.DONE).exists()
