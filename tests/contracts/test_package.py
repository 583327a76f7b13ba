"""What `pip install` installs: the package and the command, and nothing else, such as one called `app`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rolecall
from tests import commands
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip installs it, without a network."""
    return made_once(tmp_path_factory, "site", lambda folder: install(folder, tmp_path_factory.mktemp("source")))


def install(folder: Path, source: Path) -> None:
    shutil.copytree(ROOT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # --no-compile: only what is run is compiled, when it is run
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    pip = commands.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(source)], timeout=120
    )
    assert pip.returncode == 0, pip.stderr


def run(folder: Path, *command: str) -> str:
    """The output of a command that has only the installed package, in a directory without any of the sources."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [*command], cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_the_package_the_command_and_the_module_are_installed(installed: Path) -> None:
    where = "import rolecall; print(rolecall.__file__, rolecall.__version__)"
    assert run(installed, sys.executable, "-c", where).split() == [
        str(installed / "rolecall" / "__init__.py"),
        rolecall.__version__,
    ]
    jobs = run(installed, sys.executable, "-m", "rolecall", "jobs")
    assert all(name in jobs for name in ("rl", "ps", "rnn", "hybrid"))
    assert run(installed, sys.executable, str(installed / "bin" / "rolecall"), "jobs") == jobs


def test_every_file_of_the_package_is_installed_and_nothing_else(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir()}
    assert folders == {"rolecall", f"rolecall-{rolecall.__version__}.dist-info", "bin"}
    sources = {path.relative_to(ROOT / "app") for path in (ROOT / "app" / "rolecall").rglob("*.py")}
    assert {path.relative_to(installed) for path in (installed / "rolecall").rglob("*.py")} == sources
