"""`hybrid` in containers: trained to the end on two servers, watched, killed, stopped and resumed."""

from __future__ import annotations

import re

import pytest

from rolecall.declare import registry
from tests.e2e.conftest import Projects
from tests.e2e.containers import (
    Project,
    each_role_serves_its_metrics,
)
from tests.integration.cluster import until

JOB = registry.get("hybrid")
FINISHED = r"Finished: test accuracy ([\d.]+)% after (\d+) epochs"
SMALL = {"NUM_EMBEDDINGS": "50000", "EMBEDDING_DIM": "16", "HIDDEN_SIZE": "16"}


def test_make_up_hybrid_trains_to_the_end_on_two_servers(projects: Projects) -> None:
    project = projects("hybrid", "master")
    done = project.make("up-hybrid", **SMALL, SERVERS="2", EPOCHS="2")
    assert done.returncode == 0, done.stdout
    accuracy, epochs = re.findall(FINISHED, done.stdout)[-1]
    assert float(accuracy) > 30  # of a guess: 5 to 10
    assert int(epochs) == 2
    assert not project.containers()  # all have ended
    assert [one.state["ExitCode"] for one in project.containers(everyone=True)] == [0] * 5
    assert project.make("down").returncode == 0
    assert not project.left()


@pytest.fixture(scope="module")
def training(projects: Projects) -> Project:
    """A job that trains for as long as the tests below need."""
    own = {**SMALL, "EPOCHS": "1000000", "CHECKPOINT_INTERVAL": "1", "RESTARTS": "100"}
    project = projects("hybrid", "master", **own)
    project.up()
    project.trains()
    return project


def test_metrics_of_each_role(training: Project) -> None:
    until(lambda: training.rank0.metric("score"), "an epoch")
    # a ps calls nobody, and its table is in memory and of a fixed size
    absent = "drop|lost|fail|checkpoint|refused|goal|^rpc_|hybrid_stall|evictions|disk"
    each_role_serves_its_metrics(training, JOB, absent)
