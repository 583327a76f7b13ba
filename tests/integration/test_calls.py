"""Calls that hang, and peers whose process has ended, in real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.cluster import ROOT, Cluster

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
