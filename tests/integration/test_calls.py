"""Calls that hang, and peers whose process has ended, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from rolecall.observe import targets
from tests.integration.cluster import DEADLINE, QUICK, ROOT, Cluster, until

FILE = ROOT / "tests" / "integration" / "hanging.py"


@pytest.mark.parametrize("kind", ["role", "future"])
def test_a_call_that_hangs_is_a_failure_with_evidence(cluster: Callable[..., Cluster], kind: str) -> None:
    """The step is made without worker 0, or ends the generation; either way it counts."""
    job = cluster(JOB=str(FILE), KIND=kind, RPC_TIMEOUT="0.5", PHASE_TIMEOUT="20", MAX_FAILURES="1")
    job.start(2, described=True)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3, 3]
    text = job.first.text()
    problem = "worker_0 has not answered hang within 0.5 s (RPC_TIMEOUT=0.5)"
    (line,) = [line for line in text.splitlines() if "call timed out" in line]
    for part in ("peer=worker_0", "function=hang", "deadline_s=0.5", "setting='RPC_TIMEOUT=0.5'"):
        assert part in line
    assert f'File "{FILE}", line {where("threading.Event().wait()")}, in hang' in text  # its stack
    (failed,) = [line for line in text.splitlines() if "gang failed" in line]
    assert problem in failed


def where(line: str) -> int:
    """The number of the first line of the job's file that has the text `line`."""
    return next(number for number, text in enumerate(FILE.read_text().splitlines(), 1) if line in text)


def test_a_rank_that_a_local_run_sees_crash_is_no_peer_any_more(tmp_path: Path) -> None:
    environment = {**os.environ, **QUICK, "CHECKPOINT_DIR": str(tmp_path), "KIND": "first", "LEASE_SECONDS": "60"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "run", str(FILE), "--plain"],
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    try:
        until(lambda: any("training" in line for line in lines), "the training")
        (port,) = [urlsplit(rank.url).port or 0 for rank in targets.ranks_of(tmp_path) if rank.name == "worker 1"]
        ranks = psutil.Process(process.pid).children(recursive=True)
        (crashing,) = [each for each in ranks if listens(each, port)]
        os.kill(crashing.pid, signal.SIGKILL)
        until(lambda: any("gang lost" in line for line in lines), "the loss")
        (tmp_path / "files" / "stop").touch()
        assert process.wait(DEADLINE) == 0, "".join(lines)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()
    (lost,) = [line for line in lines if "gang lost" in line]
    assert "reason='the process of worker 1 ended'" in lost, "".join(lines)


def listens(process: psutil.Process, port: int) -> bool:
    """Whether it serves the metrics at `port`, as a rank's supervisor does."""
    return any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections())
