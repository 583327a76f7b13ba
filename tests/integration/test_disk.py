"""A disk that hangs under rank 0 delays the next generation and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.disk import SlowDisk
from tests.integration.cluster import QUICK, Cluster, until


def test_leases_probes_and_metrics_outlast_a_disk_that_hangs(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "fsync")
    job = cluster(cold=("agent-0",), CHECKPOINT_INTERVAL="1000", **disk.environment).start()
    job.is_whole()

    def retries() -> list[int]:
        return [job.observer(n).text().count("cannot be reached, retrying") for n in range(2)]

    at_start = retries()  # an observer may have been there before rank 0
    disk.slow(1000)
    number = job.agent.metric("gang_generations_total")
    job.agent.kill_worker()
    until(lambda: job.agent.metric("gang_state", state="gathering"), "the next generation to be waited for")
    until(lambda: job.agent.metric("disk_wait_seconds"), "the metric of a file that takes long")
    over = time.monotonic() + 1.5 * float(QUICK["LEASE_SECONDS"])
    while time.monotonic() < over:
        assert job.agent.get("/healthz")[0] == 200
        assert job.agent.metric("gang_registered", role="observer") == 2
        time.sleep(0.1)  # the period of looking
    assert job.agent.metric("gang_generations_total") == number  # its number is not on disk
    disk.slow(0)
    job.is_whole()
    assert job.agent.metric("gang_restarts_total", cause="silent") == 0
    assert retries() == at_start
