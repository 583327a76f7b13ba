"""examples/grpo.py: a language model that is taught by reward, with workers killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rolecall.checkpoint.checkpoint import Checkpoints, Snapshot
from rolecall.declare.loader import load_file
from tests.bits import digest
from tests.integration.cluster import ROOT, Cluster, until

MakeCluster = Callable[..., Cluster]
FILE = "examples/grpo.py"
SMALL = {
    "JOB": FILE,
    "GENERATORS": "2",
    "WIDTH": "16",
    "GROUPS": "4",
    "GROUP": "4",
    "GOAL": "2",
    "CHECKPOINT_INTERVAL": "0.2",
    "REJOIN_INTERVAL": "600",
}


def test_it_ends_after_its_updates(cluster: MakeCluster) -> None:
    job = cluster(**SMALL, TAUGHT="0", UPDATES="20", STALENESS="4").start(1, described=True)
    snapshot, summary = finished(job)
    assert (summary["steps"], summary["curve"]["label"]) == (20, "accuracy")
    assert summary["result"]["tokens"] >= 20 * 2 * 2 * 4 * 4  # two generators' halves of the prompts, of four tokens
    for batch in snapshot.state["batches"]["items"]:
        assert batch["answers"].shape == batch["logprobs"].shape == (2 * 4, 4)


def finished(job: Cluster) -> tuple[Snapshot, dict[str, Any]]:
    """The last checkpoint, and the summary."""
    assert [rank.wait() for rank in job.ranks.values()] == [0] * len(job.ranks)
    summary = json.loads((job.checkpoints / "summary.json").read_text())
    assert summary["state"] == "finished"
    newest = Checkpoints(job.checkpoints, "grpo").newest()
    assert newest is not None
    return newest, summary


def test_it_goes_on_after_kills_of_each_role(cluster: MakeCluster) -> None:
    job = cluster(**SMALL, TAUGHT="0", UPDATES="1000000", STALENESS="4").start(2, described=True)
    job.is_whole()
    generators = job.workers("generator")
    until(job.first.appears("checkpoint file="), "a checkpoint")
    job.first.kill_worker()
    until(job.first.appears("resumed file="), "a learner that goes on from its checkpoint")
    job.trains()
    assert job.workers("generator") == generators  # they have stayed, with their models
    job.ranks["generator-0"].kill_worker()
    job.member(0).kill_worker()  # a reward worker
    until(lambda: job.first.metric("gang_joins_total") >= 2, "both to join again")
    job.trains()
    assert job.first.metric("gang_generations_total") == 2
    assert job.workers("generator")["generator-1"] == generators["generator-1"]


def test_synchronous_updates_have_the_same_bits_whoever_is_killed(cluster: MakeCluster) -> None:
    settings = {**SMALL, "TAUGHT": "60", "UPDATES": "130", "STALENESS": "0"}
    job = cluster(**settings).start(2, described=True)
    job.trains(5)
    generators = job.workers("generator")
    until(job.first.appears("checkpoint file="), "a checkpoint")
    job.first.kill_worker()  # while it learns from examples
    until(job.first.appears("resumed file="), "a learner that goes on from its checkpoint")
    assert job.workers("generator") == generators
    until(lambda: job.iterations() > 62, "updates by reward")
    for name in ("generator-0", "learner-0", "reward-1"):
        job.ranks[name].kill_worker()
        job.trains()
    disturbed, summary = finished(job)
    assert summary["generations"] == 3
    undisturbed, _ = finished(cluster(**settings).start(1, described=True))
    assert digest(disturbed) == digest(undisturbed)
    assert (summary["result"]["tokens"], summary["result"]["stale"]) == (70 * 2 * 2 * 4 * 4, 0)


def test_the_log_probabilities_of_samples_are_those_that_the_learner_computes() -> None:
    grpo = load_file(ROOT / FILE)
    policy = grpo.Toy(width=16)
    prompts, answers, sampled = policy.sample(["37+48=", "99+01="], group=8, most=4)
    logprobs, mask = policy.judge(prompts, answers)
    torch.testing.assert_close(logprobs, sampled)
    ended = (answers == policy.end).cumsum(1)
    assert mask.equal((ended == 0) | ((ended == 1) & (answers == policy.end)))
    for text, row in zip(policy.decode(answers), answers.tolist(), strict=True):
        assert policy.encode([text[:4]], answers=True)[0, : len(text)].tolist() == row[: len(text)]


def test_an_update_by_reward_makes_the_better_answers_of_a_group_likelier() -> None:
    grpo = load_file(ROOT / FILE)
    torch.manual_seed(0)
    policy = grpo.Toy(width=16)
    prompts, answers, sampled = policy.sample(["37+48="], group=8, most=4)
    rewards = torch.arange(8.0).view(1, 8)
    batch = grpo.Batch(prompts=prompts, answers=answers, logprobs=sampled, rewards=rewards, version=0)
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    grpo.reward_loss(policy, batch).backward()
    optimizer.step()
    logprobs, mask = policy.judge(prompts, answers)
    change = ((logprobs - sampled) * mask).sum(1)
    assert change[-1] > 0 > change[0]
