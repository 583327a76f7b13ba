"""What a rank's death does: training goes on, with the same observers, from the newest checkpoint."""

from __future__ import annotations

import signal

from rolecall.checkpoint import checkpoint
from tests.integration.cluster import Cluster, alive, until


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


def test_a_stopped_worker_is_given_up(kept: Cluster) -> None:
    rank = kept.agent
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


def test_observer_leaves_and_another_joins(kept: Cluster) -> None:
    kept.observer(1).terminate()
    assert kept.observer(1).wait() == 0
    until(lambda: kept.members() == 1, "the observer to be gone")
    kept.observer(1).start()
    until(lambda: kept.members() == 2, "the newcomer")
    kept.trains()
    assert kept.observer(1).metric("generation") == kept.agent.metric("generation")
