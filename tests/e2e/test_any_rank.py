"""Any rank can die, on a real network: processes killed from the host, networks cut and healed, packets lost."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.e2e.conftest import Projects
from tests.e2e.containers import IMAGE, Container, Project, docker
from tests.integration.cluster import until

ALIASES = {"agent": "agent.rpc", "observer": "observer"}


@pytest.fixture(scope="module")
def training(projects: Projects, endless: dict[str, str]) -> Project:
    project = projects("rl", "agent", **endless, RESTARTS="100")
    project.up()
    is_whole(project)
    return project


def is_whole(project: Project) -> None:
    """Both observers are in a running generation, and it makes steps."""
    until(lambda: project.members("observer") == 2, "both observers in the gang", 120)
    project.trains()


def part(container: Container, name: str) -> psutil.Process:
    """A process of a container as the host sees it: tini, the first process, the supervisor, the fork server, the
    worker."""
    tini = psutil.Process(container.state["Pid"])
    (first,) = tini.children()
    if name == "first":
        return first
    (supervisor,) = until(first.children, "the supervisor")
    if name == "supervisor":
        return supervisor
    return until(lambda: [worker for server in supervisor.children() for worker in server.children()], "a worker")[0]


def test_first_process_killed(training: Project) -> None:
    rank = training.containers("agent")[0]
    restarts, worker = rank.restarts, part(rank, "worker")
    part(rank, "first").kill()
    until(lambda: not worker.is_running(), "the worker's end")
    until(lambda: rank.restarts == restarts + 1, "the container to be started again")
    is_whole(training)


def test_every_container_killed_at_once(training: Project) -> None:
    everyone = training.containers()
    restarts = [one.restarts for one in everyone]
    for one in everyone:
        one.crash()
    until(lambda: [one.restarts for one in everyone] == [n + 1 for n in restarts], "all to be started again")
    is_whole(training)


@contextmanager
def cut_off(project: Project, rank: Container, service: str) -> Iterator[None]:
    """A rank off its job's network."""
    network = project.network("rpc")
    docker("network", "disconnect", network, rank.name)
    try:
        yield
    finally:
        docker("network", "connect", "--alias", ALIASES[service], network, rank.name)


def test_observer_cut_off_and_healed(training: Project) -> None:
    rank = training.containers("observer")[0]
    with cut_off(training, rank, "observer"):
        until(lambda: training.members("observer") == 1, "the silent observer to be given up")
        until(lambda: rank.metric("generation") == 0, "its worker to leave the generation")
        training.trains()
    is_whole(training)


def test_agent_cut_off_and_healed(training: Project) -> None:
    agent, observers = training.rank0, training.containers("observer")
    with cut_off(training, agent, "agent"):
        for one in observers:
            until(lambda one=one: one.metric("generation") == 0, f"the worker of {one.name} to leave the generation")
        until(lambda: agent.metric("generation") == 0, "the agent to end its worker: nobody may train on beside it")
    is_whole(training)


def test_packets_are_lost_for_a_minute(training: Project) -> None:
    if not (shutil.which("nsenter") and shutil.which("iptables")):
        pytest.skip("packets cannot be dropped here (needs nsenter and iptables)")
    rank = training.containers("observer")[0]
    started = training.step()
    rule = ["INPUT", "!", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability", "0.2", "-j", "DROP"]
    inside = ["nsenter", "--net", "--target", str(rank.state["Pid"]), "iptables"]
    subprocess.run([*inside, "-A", *rule], check=True)
    end = time.monotonic() + 60
    try:
        until(lambda: time.monotonic() > end, "a minute to pass", 120)
        assert training.step() > started  # slowly, but it trains
    finally:
        subprocess.run([*inside, "-D", *rule], check=True)
    is_whole(training)


def test_the_masters_address_changes(training: Project) -> None:
    network = training.network("rpc")
    before = training.rank0.address(network)
    training.compose("stop", "agent")
    other = f"{training.name}-other"
    docker("run", "--detach", f"--name={other}", f"--network={network}", "--entrypoint=sleep", IMAGE, "600")
    try:
        assert Container(other).address(network) == before  # the engine gives the lowest that is free
        training.up()
        assert training.rank0.address(network) != before
        is_whole(training)
    finally:
        docker("rm", "--force", other)


def test_a_master_that_comes_late(training: Project) -> None:
    training.compose("rm", "--stop", "--force", "agent")
    observer = training.containers("observer")[0]
    unanswered = observer.metric("gang_unreachable_total")
    until(lambda: observer.metric("gang_unreachable_total") > unanswered, "the observer to retry")
    assert "rank 0 cannot be reached, retrying" in observer.logs()
    training.up()
    is_whole(training)
