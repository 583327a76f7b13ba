"""Environments that break or hang: one line says which, their observer is replaced, and the others go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]
ENVIRONMENTS = "tests.integration.environments"
WHERE = r"environment \d, step \d+ of episode \d+, seed \d+"
WHAT = {  # the other ways to break are told apart in tests/jobs/test_stepping.py
    "crash": r"raised ValueError: the simulator fell over \(\S*tests/integration/environments\.py:\d+\)",
    "hang": r"has not returned within ENV_TIMEOUT=1 s",
    "spin": r"has not returned within ENV_TIMEOUT=1 s",
}


@pytest.mark.parametrize(("way", "inference"), [("crash", "agent"), ("hang", "observer"), ("spin", "agent")])
def test_one_observer_is_replaced(way: str, inference: str, cluster: MakeCluster, tmp_path: Path) -> None:
    env_id, broken = f"{ENVIRONMENTS}:Breaks-{way}-v0", tmp_path / "broken"
    job = cluster(ENV_ID=env_id, INFERENCE=inference, BREAKS_IN=str(tmp_path), ENV_TIMEOUT="1").start(2)
    until(broken.exists, "an environment that breaks")
    line = re.compile(rf"ENV_ID={env_id}: {WHERE}: {WHAT[way]}")
    observers = job.observer(0), job.observer(1)
    until(lambda: any(line.search(observer.text()) for observer in observers), "the line")
    until(lambda: job.members() == 2 and job.agent.metric("generation") > 1, "the observer to be back")
    job.trains()
    first = next(observer for observer in observers if line.search(observer.text()))
    assert len(line.findall(first.text())) == 1
    assert first.metric("worker_restarts_total", cause="failed") == 1
    assert "Traceback" not in job.logs()
    assert "gang lost" in job.agent.text()  # the generation went on without it


def test_environments_that_always_hang_fail_the_job(cluster: MakeCluster) -> None:
    env_id = f"{ENVIRONMENTS}:Breaks-hang-v0"
    job = cluster(ENV_ID=env_id, ENV_TIMEOUT="1", REJOIN_INTERVAL="0.1", ROLLOUT_STEPS="64").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    for rank in job.ranks.values():
        assert re.search(rf"job failed.*observer 0: ENV_ID={env_id}: {WHERE}: {WHAT['hang']}", rank.text())
        assert "Traceback" not in rank.text()
