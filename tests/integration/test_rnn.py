"""The split language model as real processes: its arithmetic, its bytes, and whatever dies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rolecall.checkpoint import checkpoint
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.model import LanguageModel
from rolecall.jobs.rnn.optimizer import MAX_GRAD_NORM
from rolecall.record import rundir
from tests.integration.cluster import ENDLESS, ROOT, Cluster, alive, reported, until

MakeCluster = Callable[..., Cluster]
SHORT = {"CORPUS_BYTES": "5000"}
rnn = pytest.mark.parametrize("kept", ["rnn"], indirect=True)


def finished(job: Cluster) -> checkpoint.Snapshot:
    """Waits for the end of all ranks. Returns the last checkpoint."""
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    snapshot = checkpoint.Checkpoints(job.checkpoints, "rnn").newest()
    assert snapshot is not None
    return snapshot


def settings(**changes: str) -> RnnSettings:
    values = {**ENDLESS["rnn"], **changes}
    return RnnSettings(**{name.lower(): value for name, value in values.items()})  # type: ignore[arg-type]


def in_one_process(chosen: RnnSettings) -> LanguageModel:
    """What the job must come to, computed with torch's own loss, clipping and optimizers."""
    text = corpus.load(chosen)
    model = LanguageModel(chosen, len(text.vocabulary))
    model.embedding.sparse = False
    streams = corpus.streams(text.train, chosen.batch_size)
    optimizer: torch.optim.Optimizer
    if chosen.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), chosen.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), chosen.lr)
    for _ in range(chosen.epochs):
        state = model.lstm.start(chosen.batch_size)
        for number in range(corpus.steps(streams, chosen.sequence)):
            inputs, targets = corpus.window(streams, number, chosen.sequence)
            hidden, (one, two) = model.lstm(model.embedding(inputs), state)
            state = one.detach(), two.detach()
            optimizer.zero_grad()
            functional.cross_entropy(model.decoder(hidden).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
    return model


def test_split_training_equals_one_process_and_eval_gives_the_reported_perplexity(cluster: MakeCluster) -> None:
    changes = {**SHORT, "EPOCHS": "1", "MICRO_BATCHES": "3", "OPTIMIZER": "sgd", "LR": "0.5"}
    job = cluster(JOB="rnn", **changes).start(1)
    last = finished(job)
    expected = in_one_process(settings(**changes))
    assert last.step > 5
    weights = {**last.state, "lstm": last.state["trainer"]["lstm"]}
    for name, part in expected.named_children():
        for key, value in part.state_dict().items():
            torch.testing.assert_close(weights[name][key], value, rtol=1e-4, atol=1e-5)
    perplexity = json.loads((job.checkpoints / "DONE").read_text())["perplexity"]
    assert perplexity == pytest.approx(math.exp(last.state["history"][-1][1]))
    assert job.evaluated(last.path)["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    written = job.evaluated(last.path, "--prompt", "the ")["text"]
    assert written.startswith("the ")
    assert len(corpus.WORD.findall(written)) >= 10
    assert f"Finished: validation perplexity {perplexity:.2f} after 1 epochs" in job.first.text()
    assert all("[error" not in rank.text() for rank in job.ranks.values())


def test_resumed_run_has_the_losses_of_an_uninterrupted_run(cluster: MakeCluster) -> None:
    changes = {**SHORT, "EPOCHS": "2", "OPTIMIZER": "adam", "LR": "0.01", "DROPOUT": "0.2"}
    job = cluster(JOB="rnn", CHECKPOINT_INTERVAL="0.1", LEAVE_CODE="143", **changes).start(1)
    for hurt in ("trainer-0", "drain"):
        seen = set(job.checkpoints.glob("checkpoint-*"))
        until(lambda s=seen: set(job.checkpoints.glob("checkpoint-*")) - s, "a further checkpoint")
        generation = job.first.metric("generation")
        if hurt != "drain":
            job.ranks[hurt].kill_worker()
            until(lambda g=generation: job.first.metric("generation") > g, "the next generation")
        else:
            for rank in job.ranks.values():
                rank.terminate()
            assert [rank.wait() for rank in job.ranks.values()] == [143, 143]
            for rank in job.ranks.values():
                rank.start()
    last = finished(job)
    assert job.first.text().count("resumed") >= 2
    summary, history = reported(job.checkpoints)
    assert summary["generations"] == job.first.text().count("resumed") + 1
    assert summary["restarts"]["drained"] == 1
    assert sum(summary["restarts"].values()) == summary["generations"] - 1
    perplexities = [math.exp(validation) for _, validation in last.state["history"]]
    assert [point.value for point in history.curves["score"]] == pytest.approx(perplexities)
    assert summary["curve"]["best"]["value"] == pytest.approx(min(perplexities))
    assert summary["steps"] == last.step
    whole = finished(cluster(JOB="rnn", CHECKPOINT_INTERVAL="3600", **changes).start(1))
    torch.testing.assert_close(last.state["history"], whole.state["history"], rtol=1e-4, atol=1e-5)


@rnn
@pytest.mark.parametrize(("name", "part"), [("ps-0", "worker"), ("trainer-0", "supervisor")])
def test_any_part_killed(kept: Cluster, name: str, part: str) -> None:
    rank = kept.ranks[name]
    generation, orphan = kept.first.metric("generation"), until(rank.worker, "a worker").pid
    resumed = kept.first.appears("resumed")
    if part == "worker":
        rank.kill_worker()
    else:
        rank.kill_supervisor()
        until(lambda: not alive(orphan), "the orphan's end")
        rank.start()
    until(lambda: kept.first.metric("generation") > generation, "the next generation")
    kept.trains()
    assert resumed()


@rnn
def test_a_frozen_trainer_ends_the_generation(kept: Cluster) -> None:
    with kept.member(0).frozen("rank"):
        until(lambda: kept.first.metric("generation") == 0, "the other's worker to be ended")
    kept.trains()


def test_another_text_is_refused_and_nothing_is_touched(cluster: MakeCluster, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text((ROOT / "LICENSE").read_text())
    job = cluster(JOB="rnn", EPOCHS="1", CORPUS=str(text), **SHORT).start(1)
    finished(job)
    (job.checkpoints / "DONE").unlink()
    before = {path: path.read_bytes() for path in job.checkpoints.glob("checkpoint-*")}
    text.write_text((ROOT / "README.md").read_text())
    for rank in job.ranks.values():
        rank.start()
    assert [rank.wait() for rank in job.ranks.values()] == [2, 2]
    message = f"CORPUS={text}: the newest checkpoint was trained on another text"
    assert all(message in rank.text() for rank in job.ranks.values())
    assert {path: path.read_bytes() for path in job.checkpoints.glob("checkpoint-*")} == before


def test_a_diverging_model_ends_the_job_with_the_cause(cluster: MakeCluster) -> None:
    job = cluster(JOB="rnn", OPTIMIZER="sgd", LR="1e38").start(1)
    # it outlasts the worker; the job fails at the third failure only
    until(lambda: job.first.metric("nonfinite_losses_total"), "the first failure in the metrics")
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    cause = "the loss or its gradient is not finite; lower LR"
    assert cause in job.first.text()
    summary = json.loads((job.checkpoints / rundir.SUMMARY).read_text())
    assert summary["state"] == "failed"
    assert cause in summary["reason"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
def test_on_cuda(cluster: MakeCluster) -> None:
    last = finished(cluster(JOB="rnn", EPOCHS="4", OPTIMIZER="adam", LR="0.02", DEVICE="cuda").start(1))
    assert last.state["history"][-1][1] < last.state["history"][0][1]
