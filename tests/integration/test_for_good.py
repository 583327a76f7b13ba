"""What ends for good, in real processes: a worker that is always killed, and ranks with different settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.integration.cluster import Cluster, until
from tests.integration.test_own_job import FILE, TEXT

MakeCluster = Callable[..., Cluster]
KILLS = (
    "        if context.step >= 2:\n            import os\n            os.kill(os.getpid(), 9)\n        context.log("
)


def test_a_worker_that_is_always_killed_fails_the_job_until_a_setting_changes(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    (tmp_path / FILE.name).write_text(TEXT.replace("        context.log(", KILLS))
    job = cluster(JOB=str(tmp_path / FILE.name), MAX_RESTARTS="2", ON_FINISH="linger").start(1, described=True)
    says = "worker of lead 0 killed by SIGKILL 2 times at step "

    def lingers(count: int) -> None:
        for rank in job.ranks.values():
            until(lambda rank=rank: rank.text().count("lingering") == count, f"{rank.name} to linger")
            assert rank.text().count("the job failed") == count
            assert says in rank.text()
            assert rank.get("/readyz") == (503, "the job failed\n")
            assert rank.get("/healthz")[0] == 200

    lingers(1)
    assert job.first.metric("gang_state", state="failed") == 1
    for rank in job.ranks.values():
        rank.terminate()
        assert rank.wait() == 3
        rank.start()
    lingers(2)
    assert "this job has failed for good" in job.first.text()
    job.first.kill()
    job.first.environment["MAX_RESTARTS"] = "1"
    job.first.start()
    until(lambda: "its settings have changed, so it starts again" in job.first.text(), "another try")
