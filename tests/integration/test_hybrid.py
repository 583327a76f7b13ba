"""The hybrid job as real processes: its arithmetic, its checkpoints, and whatever dies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.checkpoint import checkpoint
from rolecall.jobs.hybrid import HybridSettings, data
from rolecall.jobs.hybrid.hashed import HashedTable
from rolecall.jobs.hybrid.model import LocalModel, build_dense, build_optimizer, load_table
from tests.integration.cluster import ENDLESS, Cluster, alive, reported, until

MakeCluster = Callable[..., Cluster]
hybrid = pytest.mark.parametrize("kept", ["hybrid"], indirect=True)
TRAINERS = 2


def finished(job: Cluster) -> checkpoint.Snapshot:
    """Wait for the end of all ranks; the last checkpoint."""
    assert {rank.wait() for rank in job.ranks.values()} == {0}
    newest = checkpoint.Checkpoints(job.checkpoints, "hybrid").newest()
    assert newest is not None
    return newest


def settings(**changes: str) -> HybridSettings:
    variables = {**ENDLESS["hybrid"], **changes}
    return HybridSettings(**{name.lower(): value for name, value in variables.items()})  # type: ignore[arg-type]


def in_one_process(chosen: HybridSettings) -> dict[str, Tensor]:
    """What the job must come to, from the union of the trainers' batches, with dense gradients."""
    samples = data.load(chosen)
    whole = LocalModel(chosen, samples.classes)
    whole.table.fill()
    table = nn.Parameter(whole.table.weight.detach().clone())
    squares = torch.zeros(len(table))
    dense: Any = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[chosen.optimizer]
    optimizer = dense(whole.dense.parameters(), chosen.lr)
    for epoch in range(chosen.epochs):
        order = torch.randperm(len(samples.train), generator=torch.Generator().manual_seed(chosen.seed * 2**20 + epoch))
        for batch in order.split(chosen.batch_size * TRAINERS):
            taken = samples.train.take(batch)
            vectors = functional.embedding_bag(
                taken.bags.rows,
                table,
                taken.bags.offsets,
                mode="sum",
                include_last_offset=True,
                per_sample_weights=taken.bags.weights,
            )
            optimizer.zero_grad()
            table.grad = None
            functional.cross_entropy(whole.dense(vectors), taken.labels).backward()
            optimizer.step()
            assert table.grad is not None
            with torch.no_grad():
                if chosen.optimizer == "adagrad":
                    squares += table.grad.square().mean(1)
                    table -= chosen.lr * table.grad / (squares.sqrt()[:, None] + 1e-10)
                else:
                    table -= chosen.lr * table.grad
    return {"table": table.detach(), **whole.dense.state_dict()}


def weights(saved: checkpoint.Snapshot) -> dict[str, Tensor]:
    return {"table": saved.state["embeddings"]["weight"], **saved.state["dense"]["weights"]}


def test_it_trains_as_one_process_does(cluster: MakeCluster) -> None:
    changes = {"EPOCHS": "3", "OPTIMIZER": "sgd", "SERVERS": "2", "BATCH_SIZE": "10"}
    job = cluster(JOB="hybrid", **changes).start(TRAINERS)
    saved = finished(job)
    assert saved.step == 3 * 6  # in the last step of an epoch one trainer has a sample and the other none
    for name, value in in_one_process(settings(**changes)).items():
        torch.testing.assert_close(weights(saved)[name], value, rtol=1e-4, atol=1e-6)
    done = json.loads((job.checkpoints / "DONE").read_text())
    assert done["samples"] == 303
    assert job.evaluated(saved.path)["accuracy"] == pytest.approx(done["accuracy"])
    assert f"Finished: test accuracy {done['accuracy']:.2%} after 3 epochs" in job.first.text()
    assert all("[error" not in rank.text() for rank in job.ranks.values())


def test_interrupted_and_resumed_it_is_an_uninterrupted_run(cluster: MakeCluster) -> None:
    """With the table on disk, of a server that does not see the master's directory; that of the one process is in
    memory.
    """
    changes = {"EPOCHS": "12", "OPTIMIZER": "adagrad", "LR": "0.02", "NUM_EMBEDDINGS": "20000"}  # more than fit
    job = cluster(JOB="hybrid", CHECKPOINT_INTERVAL="0.05", TABLE_MEMORY="240kB", **changes)
    apart = job.directory / "apart"
    for role, ordinal in (("master", 0), ("ps", 0), *(("trainer", number) for number in range(TRAINERS))):
        job.add(role, ordinal, **({"CHECKPOINT_DIR": str(apart)} if role == "ps" else {})).start()
    for hurt in ("trainer-1", "ps-0"):
        seen = set(job.checkpoints.glob("checkpoint-*"))
        until(lambda s=seen: set(job.checkpoints.glob("checkpoint-*")) - s, "a further checkpoint")
        resumed = job.first.appears("resumed")
        job.ranks[hurt].kill_worker()
        until(resumed, "the next generation")
    saved = finished(job)
    summary, _ = reported(job.checkpoints)
    assert summary["generations"] >= 3
    assert sum(summary["restarts"].values()) == summary["generations"] - 1
    assert summary["steps"] == saved.step
    assert summary["curve"]["final"] == summary["result"]["accuracy"]
    assert not (apart / "shards").exists()
    for name, value in in_one_process(settings(**changes)).items():
        torch.testing.assert_close(weights(saved)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"NUM_EMBEDDINGS": "20000", "TABLE_MEMORY": "240kB"}], ids=["memory", "disk"])
def test_kept_servers_begin_again_without_a_checkpoint(cluster: MakeCluster, options: dict[str, str]) -> None:
    changes = {"EPOCHS": "15", "OPTIMIZER": "adagrad", "LR": "0.02", **options}
    job = cluster(JOB="hybrid", CHECKPOINT_INTERVAL="600", **changes).start(TRAINERS)
    until(lambda: job.iterations() > 0, "a step")
    servers = job.workers("ps")
    job.ranks["trainer-1"].kill_worker()
    until(lambda: job.first.metric("generation") > 1, "the next generation")
    assert job.workers("ps") == servers
    saved = finished(job)
    for name, value in in_one_process(settings(**changes)).items():
        torch.testing.assert_close(weights(saved)[name], value, rtol=1e-3, atol=3e-4)


def test_an_interrupted_hashed_table_has_the_ids_and_rows_of_an_uninterrupted_one(cluster: MakeCluster) -> None:
    """Rows are born, forgotten and evicted all the time."""
    changes = {
        "TABLE": "hashed",
        "TTL": "2",
        "MAX_ROWS": "24",
        "FILTER_IDS": "1000",
        "SERVERS": "2",
        "EPOCHS": "12",
        "OPTIMIZER": "adagrad",
        "LR": "0.02",
    }
    job = cluster(JOB="hybrid", CHECKPOINT_INTERVAL="0.05", **changes).start(TRAINERS)
    until(lambda: list(job.checkpoints.glob("checkpoint-*")), "a checkpoint")
    resumed = job.first.appears("resumed")
    job.ranks["ps-1"].kill_worker()
    until(resumed, "the next generation")
    columns = finished(job).state["embeddings"]
    expected = hashed_in_one_process(settings(**changes))
    for ordinal, table in enumerate(expected):
        saved = load_table(
            settings(**changes),
            {name: values for name, values in columns.items() if name.startswith(f"{ordinal}of") or name == "filter"},
            table.step,
        )
        assert isinstance(saved, HashedTable)
        assert 10 < table.alive <= 24
        for mine, theirs in zip(saved.entries(), table.entries(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def hashed_in_one_process(chosen: HybridSettings) -> list[HashedTable]:
    """The servers' tables that the job must come to."""
    samples = data.load(chosen)
    built = [HashedTable(chosen, ordinal) for ordinal in range(chosen.servers)]
    dense = build_dense(chosen, samples.classes)
    optimizer = build_optimizer(chosen, dense.parameters())
    for epoch in range(chosen.epochs):
        order = torch.randperm(len(samples.train), generator=torch.Generator().manual_seed(chosen.seed * 2**20 + epoch))
        for batch in order.split(chosen.batch_size * TRAINERS):
            taken = samples.train.take(batch)
            shares = taken.bags.route(chosen.servers, chosen.cells)
            vectors = torch.stack([table(share).detach() for table, share in zip(built, shares, strict=True)]).sum(0)
            vectors.requires_grad_()
            optimizer.zero_grad()
            functional.cross_entropy(dense(vectors), taken.labels).backward()
            optimizer.step()
            assert vectors.grad is not None
            for table, share in zip(built, shares, strict=True):
                plan = table.plan([share])
                table.advance(plan, plan.gradient(vectors.grad))
    return built


@hybrid
@pytest.mark.parametrize("victim", ["trainer-1", "ps-0", "master-0"])
def test_a_killed_worker_ends_the_generation_and_the_next_goes_on(kept: Cluster, victim: str) -> None:
    resumed = kept.first.appears("resumed")
    servers = kept.workers("ps")
    others = {**kept.workers("trainer"), **kept.workers("master")}
    kept.ranks[victim].kill_worker()
    until(resumed, "the next generation")
    assert not [name for name, pid in others.items() if alive(pid)]  # also one that was in an all-reduce
    assert (kept.workers("ps") == servers) is (victim != "ps-0")
    kept.is_whole()
    # losing a peer, in a call or in an all-reduce, does not count as a failure
    assert not [rank.name for rank in kept.ranks.values() if rank.metric("worker_restarts_total", cause="failed")]


@hybrid
def test_a_frozen_trainer_is_replaced_though_the_other_waits_for_its_gradient(kept: Cluster) -> None:
    resumed = kept.first.appears("resumed")
    with kept.member(1).frozen("worker"):
        until(resumed, "the next generation")
    kept.is_whole()


@hybrid
def test_checkpoints_are_written_while_it_trains(kept: Cluster) -> None:
    written = kept.first.appears("checkpoint file=")
    step = kept.iterations()
    until(written, "a checkpoint")
    until(lambda: kept.iterations() > step, "further steps")
    assert kept.ranks["ps-0"].metric("hybrid_stall_seconds_total", cause="checkpoint") > 0
    assert kept.member(0).metric("hybrid_stall_seconds_total", cause="lookup") > 0


def test_an_index_out_of_range_is_refused_before_anything_starts(cluster: MakeCluster) -> None:
    job = cluster(JOB="hybrid", DATASET="tests.integration.learning:bags_out_of_range", JOIN_GRACE="1")
    rank = job.add("trainer", 0).start()
    assert rank.wait() == 2
    assert "training sample 101 has the index 60, which is out of range: NUM_EMBEDDINGS=60" in rank.text()
    assert "Traceback" not in rank.text()
