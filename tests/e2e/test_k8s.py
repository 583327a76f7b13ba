"""Each job's rendered pods, run with the engine at hand until the job has finished, and after that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Started, StartedJob
from tests.e2e.containers import DEADLINE, docker
from tests.e2e.pods import rendered_with
from tests.integration.cluster import until

SHORT = {  # what makes a job's run a short one; the rest is as rendered
    "rl": {"INFERENCE": "observer"},
    "ps-trainers": {"EPOCHS": "3"},
    "rnn": {"EPOCHS": "1", "CORPUS_BYTES": "30000", "HIDDEN_SIZE": "32", "EMBEDDING_SIZE": "32"},
    "hybrid": {"EPOCHS": "1", "NUM_EMBEDDINGS": "50000"},
}
LONG = 240.0  # of a job's whole run: a fail-safe


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", SHORT)
def test_a_job_runs_until_it_has_finished_and_stays_so(started: Started, tmp_path: Path, job: str) -> None:
    overlay = rendered_with(tmp_path, job, **SHORT[job])
    pods = started(overlay)
    until(lambda: pods.passes("startupProbe"), "every pod started", DEADLINE)
    until(pods.finished, "the end of the job", LONG)
    until(lambda: pods.passes("livenessProbe"), "every pod alive after the end", DEADLINE)
    everyone = [pods.pod(pod) for ranks in overlay.ranks for pod in ranks.pods]
    # others than rank 0 learn of the end from it
    until(
        lambda: not any(pods.answers(pod, "/readyz") for ranks in overlay.ranks for pod in ranks.pods), "none is ready"
    )
    until(lambda: pods.rank0.metric("gang_generations_total") >= 1, "rank 0's account of the run")
    # a pod is always started again, and none of them begins anew; rank 0 knows it from its volume, others from rank 0
    for ranks in overlay.ranks:
        pods.delete(ranks.pods[0])
        pods.create(ranks, ranks.pods[0])
    until(lambda: all("lingering" in one.logs() for one in everyone), "everyone lingers", DEADLINE)
    assert pods.finished()
    assert pods.rank0.metric("gang_generations_total") == 0
    assert [one.restarts for one in everyone] == [0] * len(everyone)
    for one in everyone:
        assert pods.token not in one.logs() + docker("inspect", one.name)


@pytest.mark.timeout(600)
def test_pods_without_the_secret_say_how_it_is_made_and_start_once_it_is(started: Started, tmp_path: Path) -> None:
    pods = started(rendered_with(tmp_path, "rnn", **SHORT["rnn"]), secret=False)
    everyone = [pods.pod(pod) for ranks in pods.rendering.ranks for pod in ranks.pods]
    for one in everyone:
        until(lambda one=one: one.restarts >= 1, f"{one.name} to be started again")
        lines = set(one.logs().splitlines())
        assert len(lines) == 1, lines
        assert "`make k8s-token JOB=NAME`" in lines.pop()
    pods.create_secret()  # which a kubelet writes into the volumes of pods that there are
    until(pods.finished, "the end of the job", LONG)


def test_pods_are_scaled_and_deleted_while_it_trains(started: Started, tmp_path: Path) -> None:
    pods = started(rendered_with(tmp_path, "rl", **ENDLESS))
    agent, observer = pods.rendering.ranks
    until(lambda: pods.rank0.metric("step") > 0, "a first step", DEADLINE)
    for number in (2, 3):
        pods.create(observer, f"observer-{number}")
    until(lambda: pods.rank0.metric("gang_members", role="observer") == 4, "the new replicas are in", DEADLINE)
    for number in (2, 3):
        pods.delete(f"observer-{number}")
    until(lambda: pods.rank0.metric("gang_members", role="observer") == 2, "the others go on", DEADLINE)
    assert pods.rank0.metric("gang_generations_total") == 1
    for ranks in (observer, agent):
        step = pods.rank0.metric("step")
        pods.delete(ranks.pods[0])
        pods.create(ranks, ranks.pods[0])
        until(lambda: pods.rank0.metric("step") > step, "further steps", LONG)  # noqa: B023
        until(lambda: pods.passes("readinessProbe"), "every pod is ready", DEADLINE)
    assert pods.rank0.logs().count("resumed") >= 1


def test_two_copies_side_by_side_and_a_rank_0_that_moves_to_a_slow_disk(started: Started, tmp_path: Path) -> None:
    """On one network, with one token. No answer of DNS ever changes, as if each were cached."""
    one = started(rendered_with(tmp_path / "one", "rl", **ENDLESS))
    two = started(rendered_with(tmp_path / "two", "rl", prefix="b-", **ENDLESS), beside=one)
    for pods in (one, two):
        until(lambda pods=pods: pods.rank0.metric("step") > 0, "a first step", DEADLINE)
    generations = two.rank0.metric("gang_generations_total")
    agent, observer = one.rendering.ranks
    before = one.rank0.address(one.network)
    one.delete(agent.pods[0])
    taken = one.run_idle()
    slow = tmp_path / "slow"
    slow.mkdir()
    one.create(agent, agent.pods[0], slow_disk=slow)
    assert one.rank0.address(one.network) != before
    until(lambda: "resumed" in one.rank0.logs(), "the moved rank 0 resumes", DEADLINE)
    until(lambda: one.rank0.metric("gang_members", role="observer") == 2, "its observers are in", DEADLINE)
    docker("rm", "--force", taken)
    # a rank of the copy that is led to this one is refused, and replaces nobody
    stray = one.create(observer, "observer-2", INSTANCE="b-rl")
    until(lambda: "observer_2 has INSTANCE=b-rl, rank 0 has INSTANCE=rl" in stray.logs(), "the refusal", DEADLINE)
    docker("rm", "--force", stray.name)
    # its disk hangs for longer than a lease, and a liveness probe's patience: nobody takes it for dead
    until(lambda: one.rank0.metric("checkpoint_seconds_count") > 0, "a checkpoint")
    number = one.rank0.metric("gang_generations_total")
    (slow / "seconds").write_text("1000")
    end = time.monotonic() + 8
    until(lambda: not one.answers(agent.pods[0], "/healthz") or time.monotonic() > end, "a while")
    assert time.monotonic() > end
    saved = one.rank0.metric("checkpoint_seconds_count")
    (slow / "seconds").write_text("0")
    until(lambda: one.rank0.metric("checkpoint_seconds_count") > saved + 1, "further checkpoints", DEADLINE)
    assert one.rank0.metric("gang_generations_total") == number
    assert one.rank0.restarts == 0
    step = two.rank0.metric("step")
    until(lambda: two.rank0.metric("step") > step, "the other copy trains")
    assert two.rank0.metric("gang_generations_total") == generations


# ---- jobs that end


def test_a_job_ends_whoever_is_evicted_or_crashes(job_pods: StartedJob, tmp_path: Path) -> None:
    pods = job_pods(rendered_with(tmp_path, "rl-indexed", **ENDLESS | {"MAX_ITERATIONS": "200"}))
    agent, observer = pods.rendering.ranks
    until(lambda: pods.pod(agent, 0).metric("checkpoint_seconds_count") > 0, "a checkpoint", DEADLINE)
    pods.evict(agent, 0)
    assert pods.pod(agent, 0).state["ExitCode"] == 143  # 0 would be the end of the Job
    pods.pod(observer, 1).crash()
    until(lambda: not pods.complete() and "resumed" in pods.pod(agent, 0).logs(), "the next pod resumes", DEADLINE)
    until(pods.complete, "every Job is complete", LONG)
    assert not pods.failed
    assert pods.running() == []


def test_bad_input_fails_a_job_at_once(job_pods: StartedJob, tmp_path: Path) -> None:
    pods = job_pods(rendered_with(tmp_path, "rnn-indexed"), secret=False)
    until(lambda: pods.reconcile() or len(pods.failed) == 2, "both Jobs to fail", DEADLINE)
    assert set(pods.failed.values()) == {"index 0 ended with 2"}
    assert pods.running() == []
