"""What a rank's death does: training goes on, with the same observers, from the newest checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from rolecall.checkpoint import checkpoint
from tests.integration.cluster import Cluster, alive, until

MakeCluster = Callable[..., Cluster]


def test_agents_worker_killed(kept: Cluster) -> None:
    generation, killed = kept.agent.metric("generation"), kept.agent.metric("gang_restarts_total", cause="killed")
    resumed = kept.agent.appears("resumed")
    kept.agent.kill_worker()
    until(lambda: kept.agent.metric("generation") > generation, "the next generation")
    kept.trains()
    assert resumed()
    assert kept.agent.metric("gang_restarts_total", cause="killed") == killed + 1
    assert kept.members() == 2


def test_observer_comes_back_at_a_step_boundary(kept: Cluster) -> None:
    drained = kept.agent.metric("gang_restarts_total", cause="drained")
    killed = kept.observer(1).metric("worker_restarts_total", cause="killed")
    kept.observer(1).kill_worker()
    # counted, not looked at: without it the gang may be for less time than there is between two looks
    until(lambda: kept.agent.metric("gang_restarts_total", cause="drained") > drained, "a step boundary to join at")
    until(lambda: kept.members() == 2, "the observer to be back")
    kept.trains()
    assert kept.observer(1).metric("worker_restarts_total", cause="killed") == killed + 1


@pytest.mark.parametrize("role", ["agent-0", "observer-1"])
def test_whole_rank_killed_and_started_again(kept: Cluster, role: str) -> None:
    before, generation = kept.iterations(), kept.agent.metric("generation")
    rank = kept.ranks[role]
    orphan = until(rank.worker, "a worker").pid
    rank.kill()
    until(lambda: not alive(orphan), "the orphan's end")
    rank.start()
    until(lambda: rank.metric("generation") > generation, "the rank in a later generation")
    until(lambda: kept.iterations() > before, "progress beyond what was there")
    assert kept.members() == 2


def test_supervisor_alone_killed(kept: Cluster) -> None:
    orphan = until(kept.agent.worker, "a worker").pid
    kept.agent.kill_supervisor()
    until(lambda: not alive(orphan), "the orphan to end by itself")
    kept.agent.start()
    kept.trains()


@pytest.mark.parametrize("role", ["agent-0", "observer-0"])
def test_worker_stopped_is_given_up(kept: Cluster, role: str) -> None:
    rank = kept.ranks[role]
    silent = rank.metric("worker_restarts_total", cause="silent")
    stopped = rank.kill_worker(signal.SIGSTOP)
    until(lambda: not alive(stopped), "the silent worker to be ended")
    until(lambda: rank.metric("worker_restarts_total", cause="silent") > silent, "the cause to be counted")
    kept.trains()
    until(lambda: kept.members() == 2, "both observers")


def test_drain_on_sigterm_and_resume_loses_no_step(kept: Cluster) -> None:
    for rank in kept.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in kept.ranks.values()] == [0, 0, 0]
    newest = checkpoint.Checkpoints(kept.checkpoints, "rl").newest()
    assert newest is not None
    assert newest.step > 0
    assert f"checkpoint-{newest.generation:06d}-{newest.step:010d}" in kept.agent.text()
    for rank in kept.ranks.values():
        rank.start()
    until(lambda: f"step={newest.step}" in kept.agent.text().split("resumed")[-1], "the resumed step")
    kept.trains()


def test_observers_worker_killed_does_not_end_the_generation(cluster: MakeCluster) -> None:
    # a long interval: whatever happens before it ends, happens within the generation
    job = cluster(REJOIN_INTERVAL="3600").start()
    job.trains()
    generation = job.agent.metric("generation")
    job.observer(1).kill_worker()
    until(lambda: job.members() == 1, "the observer to be missed")
    job.trains()
    assert job.agent.metric("generation") == generation


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


def test_job_that_can_only_fail_ends_everywhere(cluster: MakeCluster) -> None:
    job = cluster(ENV_ID="tests.integration.environments:Broken-v0", REJOIN_INTERVAL="0.1").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    for rank in job.ranks.values():
        assert "broken on purpose" in rank.text()
    assert not (job.checkpoints / "DONE").exists()
