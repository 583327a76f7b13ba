"""`rolecall run --detach`, and the commands for such a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rolecall import __main__
from rolecall.errors import USAGE
from rolecall.observe import targets
from tests import commands

Rolecall = Callable[..., subprocess.CompletedProcess[str]]
RUN = Path("runs") / "mine"


@pytest.fixture
def rolecall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rolecall:
    """Runs a command in the test's folder, in which patient.py is a job without an end."""
    for name in ("patient.py", "beside.py"):
        shutil.copy(Path(__file__).parents[1] / "hosts" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": ""}
    return lambda *words: commands.run([sys.executable, "-m", "rolecall", *words], tmp_path, environment, 120)


def test_a_detached_run(rolecall: Rolecall) -> None:
    started = rolecall("run", "patient.py", "--name", "mine", "--detach")
    try:
        assert (started.returncode, started.stdout) == (0, "mine\n"), started.stderr
        assert "stop|fetch mine" in started.stderr
        run = targets.run_in(RUN)
        assert run is not None
        assert os.getsid(run.pid) == run.pid
        assert psutil.Process(run.pid).terminal() is None
        again = rolecall("run", "patient.py", "--name", "mine", "--detach")
        assert (again.returncode, again.stdout) == (USAGE, "")
        assert again.stderr.startswith(f"rolecall: CHECKPOINT_DIR={RUN}: is in use by another running job")
        listed = rolecall("ps", "mine").stdout.splitlines()[1:]
        assert {line.split()[0] for line in listed} == {"lead_0", "worker_0"}
    finally:
        stopped = rolecall("stop", "mine")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("rolecall: mine: stopped; checkpoints, ")
    shown = (RUN / "output.log").read_text().splitlines()
    assert shown[0].startswith("rolecall: this run as a page: ")
    assert shown[-1] == stopped.stdout.strip().replace("mine: ", "", 1)
    (RUN / "over").touch()
    resumed = rolecall("run", "patient.py", "--name", "mine", "--plain")
    assert resumed.returncode == 0, resumed.stderr
    assert "number=2" in resumed.stdout


def test_a_refused_start_is_one_line_and_leaves_no_folder(rolecall: Rolecall) -> None:
    for name in (["--name", "mine"], []):
        refused = rolecall("run", "none.py", "--detach", *name)
        assert (refused.returncode, refused.stdout) == (USAGE, "")
        assert refused.stderr == "rolecall: none.py: no such file\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--name", "a/b"], "--name 'a/b': must be "),
        (["--name", "-b"], "--name: expected one argument"),
        (["--name", "a", "--checkpoint-dir", "b"], "--name a: is the folder runs/a; "),
        (["--detach", "--in-process"], "--detach: "),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["run", "rl", *words]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"rolecall: {problem}")
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
