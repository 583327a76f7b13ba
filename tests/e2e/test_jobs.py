"""`rnn` and `hybrid` in containers: trained to the end, and watched. Of `rl` and `ps`: their own files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rolecall.declare import registry
from tests.e2e.conftest import Projects
from tests.e2e.containers import Project, each_role_serves_its_metrics
from tests.integration.cluster import until

RNN = {"VOCABULARY": "500", "EMBEDDING_SIZE": "16", "HIDDEN_SIZE": "16", "LOG_INTERVAL": "10"}
HYBRID = {"NUM_EMBEDDINGS": "50000", "EMBEDDING_DIM": "16", "HIDDEN_SIZE": "16"}
ENDLESS = {"EPOCHS": "1000000", "CHECKPOINT_INTERVAL": "1", "RESTARTS": "100"}


def finished(project: Project, target: str, ranks: int, **settings: str) -> tuple[float, int]:
    """What rank 0 says at the end of `make TARGET`: its score, and after how many epochs."""
    done = project.make(target, **settings)
    assert done.returncode == 0, done.stdout
    assert not project.containers()  # all have ended
    assert [one.state["ExitCode"] for one in project.containers(everyone=True)] == [0] * ranks
    assert project.make("down").returncode == 0
    assert not project.left()
    score, epochs = re.findall(r"Finished: \w+ \w+ ([\d.]+)%? after (\d+) epochs", done.stdout)[-1]
    return float(score), int(epochs)


def test_make_up_rnn_trains_to_the_end_on_a_folder_of_the_host(projects: Projects, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat, and the dog on the log\n" * 50)
    corpus = {"CORPUS": "/corpus", "CORPUS_DIR": str(tmp_path), "EPOCHS": "3", "LR": "0.02"}
    perplexity, epochs = finished(projects("rnn", "rnn-ps"), "up-rnn", 2, **RNN, **corpus)
    assert perplexity < 5  # of a guess: about 14
    assert epochs == 3


def test_make_up_hybrid_trains_to_the_end_on_two_servers(projects: Projects) -> None:
    accuracy, epochs = finished(projects("hybrid", "master"), "up-hybrid", 5, **HYBRID, SERVERS="2", EPOCHS="2")
    assert accuracy > 30  # of a guess: 5 to 10
    assert epochs == 2


# what has no sample yet; a ps of hybrid calls nobody, and its table is in memory and of a fixed size
NOT_YET = {
    "rnn": "drop|lost|fail|checkpoint|refused|score|goal|^rpc_",
    "hybrid": "drop|lost|fail|checkpoint|refused|goal|^rpc_|hybrid_stall|evictions|disk",
}


@pytest.mark.parametrize("job", NOT_YET)
def test_metrics_of_each_role(projects: Projects, job: str) -> None:
    settings, first = (RNN | {"CORPUS_BYTES": "200000"}, "rnn-ps") if job == "rnn" else (HYBRID, "master")
    training = projects(job, first, **settings, **ENDLESS)
    training.up()
    training.trains()
    if job == "hybrid":
        until(lambda: training.rank0.metric("score"), "an epoch")
    each_role_serves_its_metrics(training, registry.get(job), NOT_YET[job])
