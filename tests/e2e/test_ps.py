"""`ps` in containers: trained to the end, sharded, scaled, watched, killed, stopped and resumed."""

from __future__ import annotations

import re

import pytest

from rolecall.declare import registry
from tests.e2e.conftest import Projects
from tests.e2e.containers import PACED, Project, each_role_serves_its_metrics
from tests.integration import cluster
from tests.integration.cluster import until

JOB = registry.get("ps")
FINISHED = r"Finished: test accuracy ([\d.]+)% after (\d+) epochs .*\bsteps=(\d+)"
SAMPLES = 1438  # digits to train with
ENDLESS = {
    **cluster.ENDLESS["ps"],
    **PACED,
    "REJOIN_INTERVAL": "0.5",
    "CHECKPOINT_INTERVAL": "1",
    "LOG_INTERVAL": "10",
}


def test_make_up_ps_trains_to_the_end_with_one_server_and_with_two(projects: Projects) -> None:
    project = projects("ps", "ps")
    done = project.make("up-ps", EPOCHS="3")
    assert done.returncode == 0, done.stdout
    accuracy, epochs, updates = re.findall(FINISHED, done.stdout)[-1]
    assert float(accuracy) > 50  # a guess: 10
    assert (int(epochs), int(updates)) == (3, 3 * -(-SAMPLES // 64))
    assert len(project.containers("trainer", everyone=True)) == 2
    assert not project.containers("ps-shard", everyone=True)
    assert not project.containers()  # all have ended
    assert all(one.state["ExitCode"] == 0 for one in project.containers(everyone=True))

    # a number of servers is enough for make
    sharded = project.make("up-ps", EPOCHS="2", SERVERS="2", RESUME="0", WIRE_DTYPE="int8")
    assert sharded.returncode == 0, sharded.stdout
    accuracy, epochs, updates = re.findall(FINISHED, sharded.stdout)[-1]
    assert float(accuracy) > 40
    assert (int(epochs), int(updates)) == (2, 2 * -(-SAMPLES // 64))
    (shard,) = project.containers("ps-shard", everyone=True)
    assert shard.state["ExitCode"] == 0

    assert project.make("down").returncode == 0
    assert not project.left()


@pytest.fixture(scope="module")
def training(projects: Projects) -> Project:
    """A job of two servers that trains for as long as the tests below need; each leaves it with two trainers."""
    project = projects("ps", "ps", **ENDLESS, SERVERS="2", SHARDS="1", RESTARTS="100")
    project.up()
    is_whole(project)
    return project


def is_whole(project: Project, trainers: int = 2) -> None:
    until(lambda: project.members("trainer") == trainers, f"{trainers} trainers in the gang", 120)
    assert project.members("ps") == 2
    project.trains()


def test_metrics_of_each_role(training: Project) -> None:
    each_role_serves_its_metrics(training, JOB, "drop|lost|fail|checkpoint|refused|score|goal")


def test_scaled_up_and_down_while_it_trains(training: Project) -> None:
    for trainers in (4, 2):
        before = training.step()
        training.up("--scale", f"trainer={trainers}")
        assert len(training.containers("trainer")) == trainers
        until(lambda n=trainers: training.members("trainer") == n, f"{trainers} trainers in the gang")
        assert training.step() >= before  # no finished update is lost
        training.trains()
    assert training.rank0.restarts == 0
