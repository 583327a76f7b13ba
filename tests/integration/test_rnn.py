"""The split language model as real processes: its arithmetic, its bytes, and whatever dies."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rolecall.job import checkpoint
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.model import LanguageModel
from tests.integration.cluster import ENDLESS, ROOT, Cluster, alive, reported, until

MakeCluster = Callable[..., Cluster]
rnn = pytest.mark.parametrize("kept", ["rnn"], indirect=True)


def finished(job: Cluster) -> checkpoint.Snapshot:
    """Wait for the end of all ranks; the last checkpoint."""
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    found = checkpoint.Checkpoints(job.checkpoints, "rnn").newest()
    assert found is not None
    return found


def settings(**own: str) -> RnnSettings:
    found = {**ENDLESS["rnn"], **own}
    return RnnSettings(**{name.lower(): value for name, value in found.items()})  # type: ignore[arg-type]


def in_one_process(own: RnnSettings) -> LanguageModel:
    """What the job must come to, computed with torch's own loss, clipping and optimizers."""
    text = corpus.load(own)
    model = LanguageModel(own, len(text.vocabulary))
    model.embedding.sparse = False
    streams = corpus.streams(text.train, own.batch_size)
    optimizer: torch.optim.Optimizer
    if own.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), own.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), own.lr)
    for _ in range(own.epochs):
        state = model.lstm.start(own.batch_size)
        for number in range(corpus.steps(streams, own.sequence)):
            inputs, targets = corpus.window(streams, number, own.sequence)
            hidden, (one, two) = model.lstm(model.embedding(inputs), state)
            state = one.detach(), two.detach()
            optimizer.zero_grad()
            functional.cross_entropy(model.decoder(hidden).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), own.max_grad_norm)
            optimizer.step()
    return model


def test_it_is_one_process(cluster: MakeCluster) -> None:
    own = {"EPOCHS": "1", "MICRO_BATCHES": "3", "OPTIMIZER": "sgd", "LR": "0.5", "MAX_GRAD_NORM": "0.5"}
    found = finished(cluster(JOB="rnn", cold={"ps-0", "trainer-0"}, **own).start(1))
    expected = in_one_process(settings(**own))
    assert found.step > 5
    for name, part in expected.named_children():
        for key, value in part.state_dict().items():
            torch.testing.assert_close(found.state["weights"][name][key], value, rtol=1e-4, atol=1e-5)


def test_with_adam_it_learns_and_its_checkpoint_evaluates_to_what_was_said(cluster: MakeCluster) -> None:
    job = cluster(JOB="rnn", EPOCHS="3", OPTIMIZER="adam", LR="0.02", SAMPLE_TOKENS="20").start(1)
    found = finished(job)
    done = json.loads((job.checkpoints / "DONE").read_text())
    history = found.state["history"]
    assert len(history) == 3
    assert history[-1][1] < history[0][1]
    assert done["perplexity"] == pytest.approx(math.exp(history[-1][1]))
    assert evaluated(job, found)["perplexity"] == pytest.approx(done["perplexity"], rel=1e-4)
    written = evaluated(job, found, "--prompt", "the ")["text"]
    assert written.startswith("the ")
    assert len(corpus.WORD.findall(written)) >= 10
    assert "sample" in job.member(0).text()
    assert f"Finished: validation perplexity {done['perplexity']:.2f} after 3 epochs" in job.first.text()
    assert all("[error" not in rank.text() for rank in job.ranks.values())


def evaluated(job: Cluster, found: checkpoint.Snapshot, *arguments: str) -> dict[str, Any]:
    """What `python -m rolecall eval` says of a checkpoint."""
    command = [sys.executable, "-m", "rolecall", "eval", "rnn", "--checkpoint", str(found.path), "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=job.first.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_interrupted_and_resumed_it_has_the_losses_of_an_uninterrupted_run(cluster: MakeCluster) -> None:
    own = {"EPOCHS": "3", "OPTIMIZER": "adam", "LR": "0.01", "DROPOUT": "0.2"}
    job = cluster(JOB="rnn", CHECKPOINT_INTERVAL="0.2", **own).start(1)
    for hurt in ("ps-0", "trainer-0", "drain"):
        seen = set(job.checkpoints.glob("checkpoint-*"))
        until(lambda s=seen: set(job.checkpoints.glob("checkpoint-*")) - s, "a further checkpoint")
        generation = job.first.metric("generation")
        if hurt != "drain":
            job.ranks[hurt].kill_worker()
            until(lambda g=generation: job.first.metric("generation") > g, "the next generation")
        else:
            for rank in job.ranks.values():
                rank.terminate()
            assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
            for rank in job.ranks.values():
                rank.start()
    found = finished(job)
    assert job.first.text().count("resumed") >= 3
    summary, history = reported(job.checkpoints)
    assert summary["generations"] == job.first.text().count("resumed") + 1
    assert summary["restarts"]["drained"] == 1
    assert sum(summary["restarts"].values()) == summary["generations"] - 1
    perplexities = [math.exp(validation) for _, validation in found.state["history"]]
    assert [point.value for point in history.curves["score"]] == pytest.approx(perplexities)
    assert summary["curve"]["best"]["value"] == pytest.approx(min(perplexities))
    assert summary["steps"] == found.step
    whole = finished(cluster(JOB="rnn", CHECKPOINT_INTERVAL="3600", **own).start(1))
    torch.testing.assert_close(found.state["history"], whole.state["history"], rtol=1e-4, atol=1e-5)


def test_logits_never_cross_the_network(cluster: MakeCluster) -> None:
    job = cluster(JOB="rnn").start(1)
    job.trains(30)
    own = settings()
    tokens = own.batch_size * own.sequence
    found = job.member(0).metrics()

    def per_call(direction: str, method: str) -> float:
        # one more than was counted may have begun while the metrics were read
        calls = found["rolecall_rpc_calls_total", (("method", method),)] + 1
        return found[f"rolecall_rpc_{direction}_bytes_total", (("method", method),)] / calls

    # all that there is: numbers of tokens up, vectors down; hidden states and targets up, a loss down
    assert per_call("sent", "embed") <= 8 * tokens
    assert per_call("received", "embed") <= 4 * own.embedding_size * tokens
    assert per_call("sent", "decode") <= (4 * own.hidden_size + 8) * tokens
    assert per_call("received", "decode") <= 4
    # beside them whole numbers, and nothing that is called for each token
    total = "rolecall_rpc_sent_bytes_total"
    sent = {labels[0][1] for (name, labels), value in found.items() if name == total and value}
    assert sent == {"embed", "decode"}


@rnn
@pytest.mark.parametrize("part", ["worker", "supervisor", "rank"])
@pytest.mark.parametrize("name", ["ps-0", "trainer-0"])
def test_any_part_killed(kept: Cluster, name: str, part: str) -> None:
    rank = kept.ranks[name]
    generation, orphan = kept.first.metric("generation"), until(rank.worker, "a worker").pid
    resumed = kept.first.appears("resumed")
    if part == "worker":
        rank.kill_worker()
    else:
        rank.kill_supervisor() if part == "supervisor" else rank.kill()
        until(lambda: not alive(orphan), "the orphan's end")
        rank.start()
    until(lambda: kept.first.metric("generation") > generation, "the next generation")
    kept.trains()
    assert resumed()


@rnn
@pytest.mark.parametrize("name", ["ps-0", "trainer-0"])
def test_frozen_and_thawed(kept: Cluster, name: str) -> None:
    other = next(rank for rank in kept.ranks.values() if rank.name != name)
    with kept.ranks[name].frozen("rank"):
        until(lambda: other.metric("generation") == 0, "the other's worker to be ended")
    kept.trains()


@rnn
def test_all_ranks_killed_in_the_same_instant(kept: Cluster) -> None:
    step = checkpoint.Checkpoints(kept.checkpoints, "rnn").newest().step  # type: ignore[union-attr]
    for rank in kept.ranks.values():
        rank.kill()
    for rank in kept.ranks.values():
        rank.start()
    kept.trains()
    assert int(re.findall(r"resumed .*?step=(\d+)", kept.first.text())[-1]) >= step


def test_other_settings_or_another_text_are_refused_and_nothing_is_touched(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text((ROOT / "LICENSE").read_text())
    shared = {"EPOCHS": "1", "CHECKPOINT_DIR": str(tmp_path / "shared"), "CORPUS": str(text)}
    finished(cluster(JOB="rnn", **shared).start(1))
    (tmp_path / "shared" / "DONE").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "shared").glob("checkpoint-*")}
    text.write_text((ROOT / "README.md").read_text())
    for changes, message in (
        ({"HIDDEN_SIZE": "9"}, "HIDDEN_SIZE=9: the newest checkpoint in CHECKPOINT_DIR was made with 6"),
        ({"CORPUS": "tests"}, "CORPUS=tests: the newest checkpoint in CHECKPOINT_DIR was made with"),
        ({}, f"CORPUS={text}: the data are not those that checkpoint-"),
    ):
        other = cluster(JOB="rnn", **{**shared, **changes}).start(1)
        assert [rank.wait() for rank in other.ranks.values()] == [2, 2]
        assert all(message in rank.text() for rank in other.ranks.values())
    assert {path: path.read_bytes() for path in (tmp_path / "shared").glob("checkpoint-*")} == before


def test_a_diverging_model_ends_the_job_with_the_cause(cluster: MakeCluster) -> None:
    """Prometheus sees it too: the ranks stay until it has scraped them once more."""
    job = cluster(JOB="rnn", OPTIMIZER="sgd", LR="1e38").start(1)
    seen: dict[str, float] = {}

    def over() -> bool:
        for rank, name, labels in (
            (job.first, "gang_state", {"state": "failed"}),
            (job.member(0), "nonfinite_losses_total", {}),
        ):
            seen[name] = rank.metric(name, scraper=True, **labels) or seen.get(name, 0.0)
        return all(rank.process and rank.process.poll() is not None for rank in job.ranks.values())

    until(over, "the end of the job")
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    assert "the loss or its gradient is not finite; lower LR" in job.member(0).text()
    assert seen == {"gang_state": 1, "nonfinite_losses_total": 3}
    summary, _ = reported(job.checkpoints)
    assert summary["state"] == "failed"
    assert "the loss or its gradient is not finite; lower LR" in summary["reason"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
@pytest.mark.parametrize("own", [{"DEVICE": "cuda"}, {"DEVICE": "cpu", "EMBEDDING_DEVICE": "cuda"}])
def test_on_cuda(cluster: MakeCluster, own: dict[str, str]) -> None:
    found = finished(cluster(JOB="rnn", EPOCHS="4", OPTIMIZER="adam", LR="0.02", **own).start(1))
    assert found.state["history"][-1][1] < found.state["history"][0][1]
