"""What is slow is waited for, and what is stuck is replaced."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.integration.cluster import ROOT, Cluster, until

MakeCluster = Callable[..., Cluster]
FILE = ROOT / "tests" / "integration" / "sluggish.py"


def test_workers_that_load_are_waited_for_and_a_stuck_lead_is_replaced(cluster: MakeCluster) -> None:
    job = cluster(
        JOB=str(FILE), RPC_TIMEOUT="1", STUCK_SECONDS="2", CHECKPOINT_INTERVAL="3600", LOG_INTERVAL="100000"
    ).start(2, described=True)
    until(lambda: job.member(0).metric("phase", state="loading"), "a worker that loads")
    until(lambda: job.first.metric("worker_restarts_total", cause="stuck") == 1, "the stuck worker to be replaced")
    job.is_whole()
    text = job.first.text()
    assert "peer given up" not in text
    assert re.search("step 5 has taken .* s, over (STUCK_SECONDS=2|10 times the longest)", text)  # a busy machine
    assert "forget_to_release (" in text or "in forget_to_release" in text  # by py-spy, or by faulthandler
    assert job.first.metric("gang_restarts_total", cause="stuck") == 1
    assert job.first.metric("worker_restarts_total", cause="silent") == 0
