"""The ways to run `rl`, and that a kill never mixes sequences, whatever the way."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint import checkpoint
from rolecall.jobs.rl import JOB
from tests.integration.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]
MODULE = "tests.integration.remembering"
ENVIRONMENTS = "tests.integration.environments"


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
    assert 0 <= job.agent.metric("value", name="age") <= (pipeline == "1")
    assert (job.observer(0).metric("weights_bytes_total", name="policy") > 0) == (inference == "observer")


@pytest.mark.parametrize("inference", ["agent", "observer"])
def test_observers_keep_their_environments(cluster: MakeCluster, tmp_path: Path, inference: str) -> None:
    """If one joins, no worker is restarted; if the agent's worker dies, the episodes go on, and so do the statistics of
    observations."""
    resets = tmp_path / "resets"
    job = cluster(
        ENV_ID=f"{ENVIRONMENTS}:Resetting-v0", RESETS=str(resets), INFERENCE=inference, CHECKPOINT_INTERVAL="0.2"
    ).start(1)
    job.trains()
    generation = job.agent.metric("generation")
    agent, observer = job.workers("agent"), job.workers("observer")
    job.add("observer", 1).start()
    until(lambda: job.observer(1).metric("rl_env_steps_total") > 0, "steps of the new observer")
    job.trains()
    assert job.agent.metric("generation") == generation
    assert job.workers("agent") == agent
    observers = job.workers("observer")
    assert observers["observer-0"] == observer["observer-0"]
    counted = until(lambda: _counted(job), "a checkpoint")
    job.agent.kill_worker()
    until(lambda: job.agent.metric("generation") > generation, "the next generation")
    steps = job.observer(0).metric("rl_env_steps_total")
    job.trains()
    until(lambda: _counted(job) > counted, "a further checkpoint")
    samples, observations = _counted(job) or (0.0, 0.0)
    assert samples == observations > 0
    assert job.workers("observer") == observers
    assert job.observer(0).metric("rl_env_steps_total") > steps
    assert len(resets.read_text().splitlines()) == 2 * 4  # NUM_ENVS, of each observer
    assert not [rank.name for rank in job.ranks.values() if rank.metric("worker_restarts_total", cause="failed")]


def test_the_replay_buffer_survives_kills(cluster: MakeCluster) -> None:
    """An observer's, and the agent's, which continues with the rows of its newest checkpoint."""
    job = cluster(
        ALGORITHM="dqn",
        EPOCHS="",
        MINIBATCHES="",
        ROLLOUT_STEPS="4",
        LEARNING_STARTS="40",
        REPLAY_SIZE="1000",
        BATCH_SIZE="8",
        HIDDEN_SIZE="8",
        SOLVED_BY="never",
        CHECKPOINT_INTERVAL="0.2",
    ).start()
    job.trains()
    job.observer(0).kill_worker()
    until(lambda: job.members() == 2, "the observer to be back")
    until(lambda: job.agent.metric("value", name="replay_rows") == 1000, "a full buffer")
    until(lambda: (found := _newest(job)) is not None and found["replay"]["size"] == 1000, "it in a checkpoint")
    generation = job.agent.metric("generation")
    job.agent.kill_worker()
    until(lambda: job.agent.metric("generation") > generation, "the next generation")
    job.trains()
    assert job.agent.metric("value", name="replay_rows") == 1000
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    assert newest is not None
    assert {name: len(column) for name, column in newest.state["replay"].items()} == dict.fromkeys(
        ("observations", "actions", "rewards", "ends"), 1000
    )
    assert newest.state["learner"]["samples"] == newest.state["samples"]
    shutil.rmtree(job.checkpoints / "shards")
    without = checkpoint.read(newest.path, "rl").whole(JOB.training_only)  # as for `rolecall eval`
    assert without.state["learner"]["version"] == newest.state["learner"]["version"]


def _newest(job: Cluster) -> dict[str, Any] | None:
    """The learner's state in the newest checkpoint."""
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    return None if newest is None else newest.state["learner"]


def _counted(job: Cluster) -> tuple[float, float] | None:
    """The samples of the newest checkpoint, and of how many observations it has statistics."""
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    if newest is None:
        return None
    return float(newest.state["samples"]), float(newest.state["learner"]["model"]["normalizer.count"])


def test_while_the_last_episodes_are_good_nothing_is_learned(cluster: MakeCluster) -> None:
    """Whatever the policy does, it is good enough here; four iterations have 20 episodes."""
    job = cluster(ENV_ID="tests.integration.environments:Easy-v0", NUM_ENVS="2", ROLLOUT_STEPS="16").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    newest = checkpoint.Checkpoints(job.checkpoints, "rl").newest()
    assert newest is not None
    assert newest.step > 10
    assert newest.state["learner"]["version"] == 3


WHERE = r"environment \d, step \d+ of episode \d+, seed \d+"
WHAT = {  # the other ways to break are told apart in tests/jobs/test_stepping.py
    "crash": r"raised ValueError: the simulator fell over \(\S*tests/integration/environments\.py:\d+\)",
    "spin": r"has not returned within ENV_TIMEOUT=1 s",
}


@pytest.mark.parametrize(("way", "inference"), [("crash", "agent"), ("spin", "observer")])
def test_one_observer_is_replaced(way: str, inference: str, cluster: MakeCluster, tmp_path: Path) -> None:
    env_id, broken = f"{ENVIRONMENTS}:Breaks-{way}-v0", tmp_path / "broken"
    job = cluster(ENV_ID=env_id, INFERENCE=inference, BREAKS_IN=str(tmp_path), ENV_TIMEOUT="1").start(2)
    until(broken.exists, "an environment that breaks")
    line = re.compile(rf"ENV_ID={env_id}: {WHERE}: {WHAT[way]}")
    observers = job.observer(0), job.observer(1)
    until(lambda: any(line.search(observer.text()) for observer in observers), "the line")
    restarts = [functools.partial(each.metric, "worker_restarts_total", cause="failed") for each in observers]
    until(lambda: job.members() == 2 and any(each() for each in restarts), "the observer to be back")
    job.trains()
    first = next(observer for observer in observers if line.search(observer.text()))
    assert len(line.findall(first.text())) == 1
    assert first.metric("worker_restarts_total", cause="failed") == 1
    assert "Traceback" not in job.logs()
    assert job.agent.metric("generation") == 1  # it went on without the observer, which joined again


def test_environments_that_always_hang_fail_the_job(cluster: MakeCluster) -> None:
    env_id = f"{ENVIRONMENTS}:Breaks-hang-v0"
    job = cluster(ENV_ID=env_id, ENV_TIMEOUT="1", REJOIN_INTERVAL="0.1", ROLLOUT_STEPS="64").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    for rank in job.ranks.values():
        assert re.search(rf"job failed.*observer_0: ENV_ID={env_id}: {WHERE}: {WHAT['spin']}", rank.text())
        assert "Traceback" not in rank.text()
