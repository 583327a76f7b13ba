"""The ways to run `rl`, and that a kill never mixes sequences, whatever the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolecall.checkpoint import checkpoint
from tests.integration.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]
MODULE = "tests.integration.remembering"


@pytest.mark.parametrize(("inference", "pipeline"), [("agent", "1"), ("observer", "0")])
def test_a_kill_mixes_no_sequences(cluster: MakeCluster, inference: str, pipeline: str) -> None:
    """The policy's state says which observation must come next, when it acts and when it learns."""
    job = cluster(
        ENV_ID=f"{MODULE}:Steps-v0",
        POLICY=f"{MODULE}:build",
        NORMALIZE="0",
        INFERENCE=inference,
        PIPELINE=pipeline,
        ROLLOUT_STEPS="20",
        EPOCHS="2",
        CHECKPOINT_INTERVAL="0.2",
        SOLVED_BY="never",
    ).start()
    job.trains()
    job.observer(0).kill_worker()
    until(lambda: job.members() == 2, "the observer to be back")
    job.trains()
    generation = job.agent.metric("generation")
    job.agent.kill_worker()
    until(lambda: job.agent.metric("generation") > generation, "the next generation")
    job.trains()
    assert "mixed" not in job.logs()
    assert job.agent.metric("gang_restarts_total", cause="failed") == 0
    samples = job.agent.metrics()
    ages = {
        labels: value for (name, labels), value in samples.items() if name == "rolecall_rl_policy_age_versions_bucket"
    }
    # what acts is never more than one version old
    assert ages[(("le", "1.0"),)] == ages[(("le", "+Inf"),)] > 0


def test_statistics_survive_the_agent(cluster: MakeCluster) -> None:
    """Those of the observations are in the checkpoint, and go on from there."""
    job = cluster(
        ENV_ID=f"{MODULE}:Steps-v0", MEMORY="lstm", INFERENCE="observer", SOLVED_BY="never", CHECKPOINT_INTERVAL="0.2"
    ).start()
    job.trains()
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    first = _statistics(job)
    for rank in job.ranks.values():
        rank.start()
    job.trains()
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    second = _statistics(job)
    assert second["count"] > first["count"] > 0
    assert second["samples"] - second["count"] == first["samples"] - first["count"] == 0


def _statistics(job: Cluster) -> dict[str, float]:
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    assert newest is not None
    return {
        "count": float(newest.state["learner"]["model"]["normalizer.count"]),
        "samples": float(newest.state["samples"]),
    }


def test_while_the_last_episodes_are_good_nothing_is_learned(cluster: MakeCluster) -> None:
    """Whatever the policy does, it is good enough here; four iterations have 20 episodes."""
    job = cluster(ENV_ID="tests.integration.environments:Easy-v0", NUM_ENVS="2", ROLLOUT_STEPS="16").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    assert newest is not None
    assert newest.step > 10
    assert newest.state["learner"]["version"] == 3
