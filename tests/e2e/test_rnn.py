"""`rnn` in containers: trained to the end, watched, killed, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rolecall.declare import registry
from tests.e2e.conftest import Projects
from tests.e2e.containers import (
    Project,
    each_role_serves_its_metrics,
)

JOB = registry.get("rnn")
FINISHED = r"Finished: validation perplexity ([\d.]+) after (\d+) epochs"
SMALL = {"VOCABULARY": "500", "EMBEDDING_SIZE": "16", "HIDDEN_SIZE": "16", "LOG_INTERVAL": "10"}


def test_make_up_rnn_trains_to_the_end_on_a_folder_of_the_host(projects: Projects, tmp_path: Path) -> None:
    project = projects("rnn", "rnn-ps")
    tmp_path.chmod(0o755)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat, and the dog on the log\n" * 50)
    own = {**SMALL, "CORPUS": "/corpus", "CORPUS_DIR": str(tmp_path), "EPOCHS": "3", "LR": "0.02"}
    done = project.make("up-rnn", **own)
    assert done.returncode == 0, done.stdout
    perplexity, epochs = re.findall(FINISHED, done.stdout)[-1]
    assert float(perplexity) < 5  # of a guess: about 14
    assert int(epochs) == 3
    assert not project.containers()  # all have ended
    assert [one.state["ExitCode"] for one in project.containers(everyone=True)] == [0, 0]
    assert project.make("down").returncode == 0
    assert not project.left()


@pytest.fixture(scope="module")
def training(projects: Projects) -> Project:
    """A job on the image's standard library, that trains for as long as the tests below need."""
    own = {**SMALL, "CORPUS_BYTES": "200000", "EPOCHS": "1000000", "CHECKPOINT_INTERVAL": "1", "RESTARTS": "100"}
    project = projects("rnn", "rnn-ps", **own)
    project.up()
    project.trains()
    return project


def test_metrics_of_each_role(training: Project) -> None:
    each_role_serves_its_metrics(training, JOB, "drop|lost|fail|checkpoint|refused|score|goal")
