"""Each job's rendered pods, run with the engine at hand until the job has finished, and after that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Started
from tests.e2e.containers import DEADLINE, docker
from tests.e2e.pods import overlay_with
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
    overlay = overlay_with(tmp_path, job, **SHORT[job])
    pods = started(overlay)
    until(lambda: pods.passes("startupProbe"), "every pod started", DEADLINE)
    until(pods.finished, "the end of the job", LONG)
    until(
        lambda: pods.passes("readinessProbe") and pods.passes("livenessProbe"),
        "every pod ready after the end",
        DEADLINE,
    )
    until(lambda: pods.rank0.metric("gang_generations_total") >= 1, "rank 0's account of the run")
    # a pod is always started again, and none of them begins anew; rank 0 knows it from its volume, others from rank 0
    for ranks in overlay.sets:
        pods.delete(ranks.pods[0])
        pods.create(ranks, ranks.pods[0])
    until(lambda: pods.passes("readinessProbe"), "the deleted pods are ready again", DEADLINE)
    until(pods.finished, "rank 0 knows")
    assert pods.rank0.metric("gang_generations_total") == 0
    everyone = [pods.pod(pod) for ranks in overlay.sets for pod in ranks.pods]
    # ready as soon as they have heard, they linger a moment later
    until(lambda: all("lingering" in one.logs() for one in everyone), "everyone lingers")
    assert [one.restarts for one in everyone] == [0] * len(everyone)
    for one in everyone:
        assert pods.token not in one.logs() + docker("inspect", one.name)


@pytest.mark.timeout(600)
def test_pods_without_the_secret_say_how_it_is_made_and_start_once_it_is(started: Started, tmp_path: Path) -> None:
    pods = started(overlay_with(tmp_path, "rnn", **SHORT["rnn"]), secret=False)
    everyone = [pods.pod(pod) for ranks in pods.overlay.sets for pod in ranks.pods]
    for one in everyone:
        until(lambda one=one: one.restarts >= 1, f"{one.name} to be started again")
        lines = set(one.logs().splitlines())
        assert len(lines) == 1, lines
        assert "`make k8s-token JOB=NAME`" in lines.pop()
    pods.create_secret()  # which a kubelet writes into the volumes of pods that there are
    until(pods.finished, "the end of the job", LONG)


def test_pods_are_scaled_and_deleted_while_it_trains(started: Started, tmp_path: Path) -> None:
    pods = started(overlay_with(tmp_path, "rl", **ENDLESS))
    agent, observer = pods.overlay.sets
    until(lambda: pods.rank0.metric("step") > 0, "a first step", DEADLINE)
    for number in (2, 3):
        pods.create(observer, f"observer-{number}")
    until(lambda: pods.rank0.metric("gang_members", role="observer") == 4, "the new replicas are in", DEADLINE)
    for number in (2, 3):
        pods.delete(f"observer-{number}")
    until(lambda: pods.rank0.metric("gang_members", role="observer") == 2, "the others go on", DEADLINE)
    until(lambda: pods.rank0.metric("gang_generations_total") > 1, "another generation")
    for ranks in (observer, agent):
        step = pods.rank0.metric("step")
        pods.delete(ranks.pods[0])
        pods.create(ranks, ranks.pods[0])
        until(lambda: pods.rank0.metric("step") > step, "further steps", LONG)  # noqa: B023
        until(lambda: pods.passes("readinessProbe"), "every pod is ready", DEADLINE)
    assert pods.rank0.logs().count("resumed") >= 1
