"""docker/dependencies.py: what pip is asked for, for which machine, and which build of torch is taken."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
FOUND = {"cpu": "cpu 2.13.0+cpu\n", "cuda": "cuda 2.13.1+cu130\n"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "docker" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dependencies = load()


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Commands:
    """In place of `subprocess.run`: notes what would be run. `code` is pip's; `build` is the installed torch's."""

    def __init__(self) -> None:
        self.code, self.build = 0, "cpu"
        self.run: list[list[str]] = []
        self.constraints: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.run.append(command)
        if "--constraint" in command:
            self.constraints = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
        if "pip" in command:
            return SimpleNamespace(returncode=self.code)
        return SimpleNamespace(returncode=0, stdout=FOUND[self.build])

    @property
    def pips(self) -> list[list[str]]:
        return [command for command in self.run if "pip" in command]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    recorder = Commands()
    monkeypatch.setattr(subprocess, "run", recorder)
    return recorder


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dependencies.py", *arguments])
    return int(dependencies.main())


def options(command: list[str], name: str) -> list[str]:
    """What follows every `name` in `command`."""
    return [value for option, value in itertools.pairwise(command) if option == name]


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rolecall: ")
    assert said.err.count("\n") == 1
    return said.err


# ---- what is wanted


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_what_is_asked_for(tmp_path: Path, torch: str) -> None:
    option, file, *wanted = dependencies.requirements(torch, tmp_path)
    assert option == "--constraint"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wanted == [*project["dependencies"], *project["optional-dependencies"]["jobs"]]
    (torch_pin,) = [line for line in CONSTRAINTS if line.startswith("torch==")]
    pinned = Path(file).read_text().splitlines()
    assert pinned == [line for line in CONSTRAINTS if torch == "cpu" or line != torch_pin]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_wheels_for_the_images_system(machine: str) -> None:
    arguments = dependencies.target(machine)
    assert "--only-binary=:all:" in arguments  # pip demands it, and there is no compiler
    assert options(arguments, "--python-version") == [dependencies.PYTHON]
    tags = options(arguments, "--platform")
    assert all(tag.endswith(f"_{machine}") for tag in tags)
    assert {f"manylinux2014_{machine}", f"linux_{machine}", f"manylinux_2_28_{machine}"} <= set(tags)
    newest = max(int(tag.split("_")[2]) for tag in tags if tag.startswith("manylinux_2_"))
    assert newest <= 36  # bookworm's glibc


# ---- the two actions


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: Commands, machine: str) -> None:
    monkeypatch.setattr(dependencies.platform, "machine", lambda: machine)
    assert main(monkeypatch, "download", "--wheels", str(tmp_path), "--torch", "cpu", "--index", "") == 0
    (command,) = commands.run
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert options(command, "--dest") == [str(tmp_path)]
    assert options(command, "--platform") == options(dependencies.target(machine), "--platform")
    assert "--extra-index-url" not in command


@pytest.mark.parametrize("action", ["download", "install"])
def test_without_wheels_the_index_is_asked_and_pips_failure_is_this_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: Commands, action: str
) -> None:
    (tmp_path / ".gitkeep").touch()
    commands.code, index = 1, "https://example.org/whl/cpu"
    assert main(monkeypatch, action, "--wheels", str(tmp_path), "--torch", "cpu", "--index", index) != 0
    (command,) = commands.run  # there is no torch to look at
    assert options(command, "--extra-index-url") == [index]
    assert "--no-index" not in command


def test_wheels_at_hand_are_used_and_nothing_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: Commands
) -> None:
    (tmp_path / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").touch()
    arguments = ("install", "--wheels", str(tmp_path), "--torch", "cpu", "--index", "https://example.org/")
    assert main(monkeypatch, *arguments, "--into", "/opt/x/bin/python") == 0
    (command,) = commands.pips
    assert "--no-index" in command
    assert options(command, "--find-links") == [str(tmp_path)]
    assert options(command, "--python") == ["/opt/x/bin/python"]
    assert "--extra-index-url" not in command


# ---- the build of torch


@pytest.mark.parametrize("torch", ["", "CPU", "gpu"])
def test_an_unknown_build_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: Commands, torch: str
) -> None:
    for action in ("download", "install"):
        assert main(monkeypatch, action, "--wheels", str(tmp_path), "--torch", torch) == 2
        assert f"TORCH={torch!r}: no such build (cpu, cuda)" in refusal(capsys)
    assert commands.run == []


@pytest.mark.parametrize(("torch", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_the_other_build_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    commands: Commands,
    torch: str,
    other: str,
) -> None:
    commands.build = torch
    assert dependencies.check(torch, "python") == 0
    commands.build = other
    assert main(monkeypatch, "install", "--wheels", str(tmp_path), "--torch", torch, "--into", "/opt/x/python") == 2
    said = refusal(capsys)
    assert f"TORCH={torch}: " in said
    assert FOUND[other].split()[1] in said
    assert "TORCH_INDEX" in said
    assert commands.run[-1][0] == "/opt/x/python"


# ---- how far it is


def test_a_long_download_writes_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no terminal shows pip's bar."""
    monkeypatch.setattr(dependencies, "PERIOD", 0.01)
    (tmp_path / "before.whl").write_bytes(bytes(5_000_000))
    said, ends = "", time.monotonic() + 30
    with dependencies.lines("packages for x86_64", tmp_path):
        (tmp_path / "more.whl").write_bytes(bytes(1_200_000))
        while "packages for x86_64: 1.2 MB, 0 s\n" not in said and time.monotonic() < ends:
            said += capsys.readouterr().err
    assert "packages for x86_64: 1.2 MB, 0 s\n" in said
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    with dependencies.lines("packages for x86_64", tmp_path):
        assert "lines" not in [thread.name for thread in threading.enumerate()]
