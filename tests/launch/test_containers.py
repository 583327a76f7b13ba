"""`rolecall run --on docker`, with a `docker` whose containers are processes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall import Job, Role, Settings, __main__
from rolecall.declare import flags
from rolecall.errors import USAGE, UsageError
from rolecall.launch import containers, run
from rolecall.record import rundir
from tests.launch import fake_docker

DEADLINE = 60.0
PATIENT = Path(__file__).parents[1] / "hosts"
TOKEN = "a-token-of-more-than-128-bits"
COMMAND = [sys.executable, "-m", "rolecall"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="docker-") as name:
        yield Path(name)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where `docker` is the one for tests."""
    for name in ("here", "tmp"):
        (folder / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name, value in fake_docker.install(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder / "here")
    return folder / "here"


def test_what_names_an_engine() -> None:
    assert flags.take_options(["--on", "hosts:a,b"])[0] == flags.take_options(["--hosts", "a,b"])[0]
    assert flags.take_options(["--on=local"])[0] == flags.take_options([])[0]
    options, others = flags.take_options(["--on", "docker", "--seed=2", "--image", "mine:v2"])
    assert (options.engine, options.image, others) == ("docker", "mine:v2", ["--seed=2"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--on", "podman"], "--on podman"),
        (["--on", "docker:mine"], "--on docker:mine"),
        (["--on", "hosts:"], "--hosts"),
        (["--on", "hosts:a", "--hosts", "b"], "--hosts"),
        (["--on", "docker", "--hosts", "b"], "--hosts"),
        (["--on", "docker", "--in-process"], "--in-process"),
        (["--role", "a=b"], "--role"),
        (["--on", "docker", "--nodes", "2"], "--nodes: needs --on slurm"),
        (["--on", "slurm", "--image", "mine"], "--image: needs --on docker or kubernetes"),
        (["--image", "mine"], "--image"),
    ],
)
def test_wrong_options_are_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}"):
        flags.take_options(words)


def test_the_image_is_named_as_the_makefile_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMAGE", raising=False)
    monkeypatch.delenv("TORCH", raising=False)
    names = ("", "mine", "mine:v2", "registry:5000/mine", "mine@sha256:0123")
    assert [*map(containers.image_named, names)] == [
        "rolecall:cpu",
        "mine:cpu",
        "mine:v2",
        "registry:5000/mine:cpu",
        "mine@sha256:0123",
    ]
    monkeypatch.setenv("IMAGE", "ours")
    monkeypatch.setenv("TORCH", "cuda")
    assert [*map(containers.image_named, ("", "mine"))] == ["ours:cuda", "mine:cuda"]
    for wrong in ("--privileged", "a b"):
        with pytest.raises(UsageError, match=r"^--image"):
            containers.image_named(wrong)


@pytest.mark.parametrize(
    ("image", "advice"),
    [
        ("absent:cpu", "`make image`"),
        ("closed:cpu", "group docker"),
        ("down:cpu", "start it"),
        (fake_docker.OLD, "has Rolecall 0.0.1"),
    ],
)
def test_an_engine_or_an_image_that_cannot_be_used_is_a_line_that_says_what_to_do(
    here: Path, capfd: pytest.CaptureFixture[str], image: str, advice: str
) -> None:
    assert __main__.main(["run", "rl", "--on", "docker", "--image", image]) == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"rolecall: {'docker' if image in ('closed:cpu', 'down:cpu') else image}: ")
    assert advice in line
    assert not [*here.iterdir(), *(here.parent / "tmp").iterdir()]


def test_without_docker_a_line_says_so(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert __main__.main(["run", "rl", "--on", "docker"]) == USAGE
    assert capfd.readouterr().err.startswith("rolecall: docker: cannot be run (No such file or directory); install")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_gives_no_directory_away_that_has_other_files(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "mine").touch()
    assert __main__.main(["run", "rl", "--on", "docker", "--checkpoint-dir", "."]) == USAGE
    assert "has files of no run" in capfd.readouterr().err
    assert [path.stat().st_uid for path in (here, here / "mine")] == [0, 0]
    assert not [*(here.parent / "tmp").iterdir(), *(here.parent / "network").iterdir()]


def test_python_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def start(target: str, words: list[str], variables: dict[str, str], show: Callable[[str], None]) -> None:
        raise StartedError(words)

    monkeypatch.setattr(run, "ProcessRun", start)
    with pytest.raises(StartedError, match=r"\['--on=docker', '--image=mine:v2', '--given-settings=seed'\]"):
        run.start("rl", on="docker", image="mine:v2", seed=2)
    with pytest.raises(UsageError, match=r"^--in-process"):
        run.start("rl", on="docker", in_process=True)


def test_settings_of_the_options_names_are_refused() -> None:
    class Taken(Settings):
        image: str = ""

    with pytest.raises(UsageError, match="IMAGE means something else"):
        Job([Role("lead", lambda context: {})], settings=Taken)


# ---- a run


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def running(folder: Path) -> dict[str, dict[str, str]]:
    """What `docker inspect` would show of each container, by rank."""
    there = {}
    for path in (folder / "container").iterdir():
        there["-".join(path.name.split("-")[3:])] = json.loads(path.read_text() or "{}")
    return there


def test_a_run_survives_kills_keeps_its_secrets_and_leaves_nothing_behind(here: Path) -> None:
    folder, kept = here.parent, here / "kept"
    log, generation = kept / "logs" / "worker_0.log", kept / rundir.GENERATION
    shutil.copytree(PATIENT, folder / "job")
    environment = {**os.environ, "JOB_TOKEN": TOKEN, "LEASE_SECONDS": "2"}
    words = ["run", str(folder / "job" / "patient.py"), "--on", "docker", "--plain", "--checkpoint-dir", "kept"]
    with subprocess.Popen([*COMMAND, *words], env=environment, stdout=subprocess.DEVNULL) as killed:
        until(lambda: (kept / rundir.HISTORY).exists() or killed.poll() is not None, "no step was made")
        killed.kill()
    until(lambda: not running(folder), "the ranks of the killed run do not end")
    assert [*(folder / "network").iterdir()]
    with subprocess.Popen([*COMMAND, *words], env=environment, stdout=subprocess.PIPE, text=True) as started:
        try:
            until(lambda: json.loads(generation.read_text())["number"] == 2, "the next run does not go on")
            shown = running(folder)
            assert {*shown} == {"lead-0", "worker-0"}
            assert not any(TOKEN in each["shown"] for each in shown.values())
            assert {each["user"].partition(":")[0] for each in shown.values()} == {str(os.getuid() or containers.USER)}
            listed = subprocess.run([*COMMAND, "ps", "kept"], capture_output=True, text=True, check=True)
            assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["lead_0", "worker_0"]
            subprocess.run([*COMMAND, "kill", "kept", "worker_0"], check=True)
            subprocess.run([*COMMAND, "scale", "kept", "worker=2"], check=True)
            until(lambda: log.read_text().count("began in") >= 3, "the killed rank is not back")
            until(lambda: "worker-1" in running(folder), "no rank was added")
            (kept / "over").touch()
            said, _ = started.communicate(timeout=DEADLINE)
        finally:
            started.send_signal(signal.SIGTERM)
    assert started.returncode == 0
    assert "worker_0 crashed (SIGKILL), restarting it" in said
    assert said.splitlines()[-1] == "rolecall: finished; checkpoints, logs, summary.json, page.html in kept"
    assert {path.stat().st_uid for path in kept.rglob("*")} == {os.getuid()}
    assert not [*(folder / "container").iterdir(), *(folder / "network").iterdir()]
    assert not [*(folder / "tmp").glob("rolecall-*")]
