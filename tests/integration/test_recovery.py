"""What a rank's death does: training goes on, with the same observers, from the newest checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from app import checkpoint
from tests.integration.cluster import Cluster, alive, until

MakeCluster = Callable[..., Cluster]


def test_agents_worker_killed(cluster: MakeCluster) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start()
    job.trains()
    until(lambda: list(job.checkpoints.glob("checkpoint-*")), "a checkpoint")
    generation = job.agent.metric("generation")
    job.agent.kill_worker()
    until(lambda: job.agent.metric("generation") > generation, "the next generation")
    job.trains()
    assert "resumed" in job.agent.text()
    assert job.agent.metric("gang_restarts_total", cause="killed") == 1
    assert job.members() == 2


def test_observers_worker_killed_does_not_end_the_generation(cluster: MakeCluster) -> None:
    # a long interval: whatever happens before it ends, happens within the generation
    job = cluster(REJOIN_INTERVAL="3600").start()
    job.trains()
    generation = job.agent.metric("generation")
    job.observer(1).kill_worker()
    until(lambda: job.members() == 1, "the observer to be missed")
    job.trains()
    assert job.agent.metric("generation") == generation


def test_observer_comes_back_at_a_step_boundary(cluster: MakeCluster) -> None:
    job = cluster().start()
    job.trains()
    job.observer(1).kill_worker()
    # counted, not looked at: without it the gang may be for less time than there is between two looks
    until(lambda: job.agent.metric("gang_restarts_total", cause="drained") >= 1, "a step boundary to take it in at")
    until(lambda: job.members() == 2, "the observer to be back")
    job.trains()
    assert job.observer(1).metric("worker_restarts_total", cause="killed") == 1


@pytest.mark.parametrize("role", ["agent-0", "observer-1"])
def test_whole_rank_killed_and_started_again(cluster: MakeCluster, role: str) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start()
    job.trains()
    before = job.iterations()
    rank = job.ranks[role]
    orphan = until(rank.worker, "a worker").pid
    rank.kill()
    until(lambda: not alive(orphan), "the orphan's end")
    rank.start()
    until(lambda: rank.metric("generation") >= 2, "the rank in a later generation")
    until(lambda: job.iterations() > before, "progress beyond what was there")
    assert job.members() == 2


def test_supervisor_alone_killed(cluster: MakeCluster) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start()
    job.trains()
    orphan = until(job.agent.worker, "a worker").pid
    job.agent.kill_supervisor()
    until(lambda: not alive(orphan), "the orphan to end by itself")
    job.agent.start()
    job.trains()


@pytest.mark.parametrize("role", ["agent-0", "observer-0"])
def test_worker_stopped_is_given_up(cluster: MakeCluster, role: str) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start()
    job.trains()
    rank = job.ranks[role]
    stopped = rank.kill_worker(signal.SIGSTOP)
    until(lambda: not alive(stopped), "the silent worker to be ended")
    until(lambda: rank.metric("worker_restarts_total", cause="silent") == 1, "the cause to be counted")
    job.trains()
    until(lambda: job.members() == 2, "both observers")


def test_drain_on_sigterm_and_resume_loses_no_step(cluster: MakeCluster) -> None:
    job = cluster().start()
    job.trains()
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    assert newest is not None
    assert newest.step > 0
    assert f"checkpoint-{newest.generation:06d}-{newest.step:010d}" in job.agent.text()
    for rank in job.ranks.values():
        rank.start()
    until(lambda: f"iteration={newest.step}" in job.agent.text().split("resumed")[-1], "the resumed iteration")
    job.trains()


def test_observer_leaves_and_another_joins(cluster: MakeCluster) -> None:
    job = cluster().start()
    job.trains()
    job.observer(1).terminate()
    assert job.observer(1).wait() == 0
    until(lambda: job.members() == 1, "the observer to be gone")
    newcomers = [job.add("observer", ordinal).start() for ordinal in (1, 2)]
    until(lambda: job.members() == 3, "both newcomers")
    job.trains()
    assert all(rank.metric("generation") == job.agent.metric("generation") for rank in newcomers)


def test_observers_without_an_ordinal_get_one(cluster: MakeCluster) -> None:
    job = cluster(OBSERVERS="2")
    job.add("agent", 0).start()
    for number in (0, 1):
        job.add("observer", number, ORDINAL="").start()
    until(lambda: job.members() == 2, "both observers")
    job.trains()
    assert {job.observer(n).text().count("ordinal assigned") for n in (0, 1)} == {1}


def test_job_that_can_only_fail_ends_everywhere(cluster: MakeCluster) -> None:
    job = cluster(ENV_ID="tests.integration.environments:Broken-v0", REJOIN_INTERVAL="0.1").start()
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3, 3]
    for rank in job.ranks.values():
        assert "broken on purpose" in rank.text()
    assert not (job.checkpoints / "DONE").exists()
