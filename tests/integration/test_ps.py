"""The parameter server as real processes: its arithmetic, its modes, and its bookkeeping whatever dies."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from rolecall.checkpoint import checkpoint
from rolecall.record import rundir
from tests.bits import digest
from tests.disk import SlowDisk
from tests.integration import learning
from tests.integration.cluster import Cluster, reported, until

MakeCluster = Callable[..., Cluster]
HERE = "tests.integration.learning:"


def finished(job: Cluster) -> checkpoint.Snapshot:
    """Waits for the end of the job; its last checkpoint."""
    assert [rank.wait() for rank in job.ranks.values()] == [0] * len(job.ranks)
    snapshot = checkpoint.Checkpoints(job.checkpoints, "ps").newest()
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("settings", [{}, {"SERVERS": "3"}], ids=["one server", "three servers"])
def test_sync_is_one_process_with_the_union_of_the_batches(cluster: MakeCluster, settings: dict[str, str]) -> None:
    chosen = {"MODEL": HERE + "small", "DATASET": HERE + "blobs", "BATCH_SIZE": "8", "EPOCHS": "3", "LR": "0.1"}
    job = cluster(JOB="ps", MOMENTUM="0.9", LR_SCHEDULE="cosine", **chosen, **settings).start(2)
    snapshot = finished(job)

    torch.manual_seed(1)
    model = learning.small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    inputs, targets = learning.blobs()[0].tensors
    for epoch in range(3):
        order = np.random.default_rng((1, epoch)).permutation(90)
        for start in range(0, 90, 16):
            batch = torch.from_numpy(order[start : start + 16])
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * (90 * epoch + start) / 270)) / 2
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(snapshot.state["model"]["parameters"], expected, rtol=1e-4, atol=1e-5)
    assert snapshot.step == 3 * 6


def test_sync_has_the_same_bits_whoever_is_killed_and_joins(cluster: MakeCluster) -> None:
    chosen = {"DATASET": HERE + "blobs", "BATCH_SIZE": "6", "EPOCHS": "30", "LR": "0.1", "MOMENTUM": "0.9"}
    job = cluster(JOB="ps", MODEL=HERE + "slow_noisy", CHECKPOINT_INTERVAL="0.3", **chosen).start(3)
    for name in ("trainer-1", "ps-0", "trainer-0"):
        job.trains(4)
        job.ranks[name].kill_worker()
    job.add("trainer", 3).start()
    disturbed = finished(job)
    undisturbed = cluster(JOB="ps", MODEL=HERE + "noisy", **chosen)
    assert digest(finished(undisturbed.start(3))) == digest(disturbed)
    assert "trainer joined" in job.first.text()
    assert "resumed" in job.first.text()


@pytest.mark.parametrize("mode", ["async", "local", "autograd"])
def test_each_other_mode_learns_and_its_checkpoint_evaluates_to_what_was_logged(
    cluster: MakeCluster, mode: str
) -> None:
    # no batch of two is left over, whose gradient through a BatchNorm can be of any size
    chosen = {"MODEL": HERE + "normed", "DATASET": HERE + "blobs", "BATCH_SIZE": "9", "EPOCHS": "20", "LR": "0.1"}
    job = cluster(JOB="ps", UPDATE_MODE=mode, **chosen).start(2)
    snapshot = finished(job)
    accuracy = json.loads((job.checkpoints / "DONE").read_text())["accuracy"]
    assert accuracy >= 0.75
    assert f"Finished: test accuracy {accuracy:.2%} after 20 epochs" in job.first.text()
    # the settings are the checkpoint's, but for those that name code
    words = ["--model", chosen["MODEL"], "--dataset", chosen["DATASET"]]
    assert job.evaluated(snapshot.path, *words, environment=os.environ)["accuracy"] == pytest.approx(accuracy)
    summary, history = reported(job.checkpoints)
    assert summary["curve"]["final"] == accuracy
    assert summary["throughput"]["total"] == summary["result"]["samples"]
    assert history.curves["loss"]
    assert all(line.count("[error") == 0 for rank in job.ranks.values() for line in rank.text().splitlines())


@pytest.mark.parametrize(
    ("settings", "trainers", "epochs", "killed"),
    [
        # trainers stay while rank 0's worker is replaced, and join again after a loss
        (
            {"UPDATE_MODE": "async", "MAX_STALENESS": "1"},
            3,
            16,
            ("trainer-1", "ps-0", "trainer-0", "ps-0"),
        ),
        # in the midst of a round; with one trainer a difference counts its own samples
        (
            {"UPDATE_MODE": "local", "OUTER_LR": "1", "OUTER_MOMENTUM": "0", "INNER_STEPS": "6"},
            1,
            18,
            ("trainer-0", "ps-0"),
        ),
    ],
    ids=["async", "local"],
)
def test_every_sample_is_used_exactly_once_an_epoch_whoever_is_killed(
    cluster: MakeCluster, settings: dict[str, str], trainers: int, epochs: int, killed: tuple[str, ...]
) -> None:
    job = cluster(JOB="ps", EPOCHS=str(epochs), CHECKPOINT_INTERVAL="0.3", **settings).start(trainers)
    for name in killed:
        job.trains(4)
        job.ranks[name].kill_worker()
    snapshot = finished(job)
    assert snapshot.state["model"]["parameters"].tolist() == [epochs] * learning.SAMPLES
    assert "resumed" in job.first.text()


@pytest.mark.parametrize("mode", ["sync", "async", "local"])
def test_trainers_join_stay_and_return(cluster: MakeCluster, mode: str) -> None:
    """A join restarts nobody; the next generation keeps the trainers' processes; a killed one is missed before its
    lease runs out, and joins again."""
    job = cluster(JOB="ps", UPDATE_MODE=mode, INNER_STEPS="4", CHECKPOINT_INTERVAL="0.3", LEASE_SECONDS="600").start(2)
    job.trains()

    # joins
    generation, pids = job.first.metric("generation"), workers(job)
    job.add("trainer", 2).start()
    until(lambda: job.members() == 3, "the third trainer")
    computes(job, 2)
    job.trains()
    assert job.first.metric("generation") == generation
    joined = workers(job)
    assert {name: joined[name] for name in pids} == pids

    # is killed, of `local` with its supervisor, and returns
    job.member(0).kill() if mode == "local" else job.member(0).kill_worker()
    until(lambda: job.first.metric("ps_trainers_dropped_total") == 1, "the trainer to be missed")
    job.trains()
    if mode == "local":
        job.member(0).start()
    until(lambda: job.members() == 3, "it to return")
    job.trains()
    computes(job, 0)
    assert job.first.metric("generation") == generation
    returned = workers(job)
    assert {name for name in joined if returned[name] != joined[name]} == {"trainer-0"}

    # stays while rank 0's worker is replaced
    job.first.kill_worker()
    until(lambda: job.first.metric("generation") > generation, "the next generation")
    until(lambda: job.members() == 3, "all trainers in it")
    job.trains()
    stayed = workers(job)
    assert {name for name in returned if stayed[name] != returned[name]} == {"ps-0"}
    assert all("[error" not in job.member(ordinal).text() for ordinal in (1, 2))


def computes(job: Cluster, ordinal: int) -> None:
    """Waits until the trainer computes a gradient."""
    samples = job.member(ordinal).metric("ps_computed_samples_total")
    until(
        lambda: job.member(ordinal).metric("ps_computed_samples_total") != samples,
        f"a gradient of trainer {ordinal}",
    )


def workers(job: Cluster) -> dict[str, int]:
    """The worker's process of each rank."""
    return {name: until(rank.worker, f"a worker of {name}").pid for name, rank in job.ranks.items()}


def test_a_trainer_that_never_sends_its_gradient_is_given_up(cluster: MakeCluster) -> None:
    """It sends heartbeats, but its main thread hangs."""
    job = cluster(JOB="ps", STEP_TIMEOUT="2", MODEL=HERE + "Hanging").start(2)
    until(lambda: "trainer given up" in job.first.text(), "the hanging trainer to be given up")
    assert "STEP_TIMEOUT=2" in job.first.text()


def test_a_server_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    disk = SlowDisk(tmp_path / "fsync")  # of rank 0 it would perhaps stop a checkpoint that is whole
    job = cluster(JOB="ps", SERVERS="2", CHECKPOINT_INTERVAL="0.2", cold={"ps-1"}, **disk.environment).start(1)
    until(lambda: checkpoint.newest_first(job.checkpoints), "a checkpoint")
    shards = job.checkpoints / rundir.SHARDS

    def torn() -> list[Path]:
        """The shards of a checkpoint that is being written."""
        valid = {path.stem for path in checkpoint.newest_first(job.checkpoints)}
        return [path for path in shards.glob("*/*.safetensors") if path.parent.name not in valid]

    disk.slow(1000)  # no file is closed any more
    until(
        lambda: disk.has_held() and len({path.parent for path in torn()}) == 1,
        "a shard to be under way, and nothing else",
    )
    newest = checkpoint.newest_first(job.checkpoints)[0]
    left = torn()[0].parent
    job.ranks["ps-1"].kill()
    assert checkpoint.newest_first(job.checkpoints)[0] == newest
    disk.slow(0)
    job.ranks["ps-1"].start()
    resumed = f"file={newest.name}"
    until(lambda: any("resumed" in line and resumed in line for line in job.first.text().splitlines()), resumed)

    def snapshot() -> checkpoint.Snapshot | None:
        """The newest checkpoint, of a later generation."""
        newest = checkpoint.Checkpoints(job.checkpoints, "ps").newest()
        return newest if newest and newest.generation > 1 else None

    until(snapshot, "a checkpoint of the next generation")
    until(lambda: not left.exists(), "the torn one to be deleted")


def test_data_that_fails_while_it_trains_ends_the_job_with_the_cause(cluster: MakeCluster) -> None:
    job = cluster(JOB="ps", DATASET=HERE + "broken").start(1)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    assert "the data is broken on purpose" in job.first.text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
@pytest.mark.parametrize("settings", [{}, {"UPDATE_MODE": "async"}, {"UPDATE_MODE": "autograd"}])
def test_on_cuda(cluster: MakeCluster, settings: dict[str, str]) -> None:
    chosen = {"MODEL": "", "DATASET": "digits", "BATCH_SIZE": "32", "EPOCHS": "10", "LR": "0.03", "MOMENTUM": "0.9"}
    job = cluster(JOB="ps", DEVICE="cuda", **chosen, **settings).start(2)
    assert job.evaluated(finished(job).path)["accuracy"] >= 0.9
