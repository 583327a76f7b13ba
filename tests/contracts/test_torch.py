"""What Rolecall takes from torch's texts, held against the installed torch: each error that a peer's end, silence or
failure causes is made in real processes.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests import commands
from tests.once import made_once
from tests.ports import free_ports
from tools import versions

ROOT = Path(__file__).resolve().parents[2]
LOST = {
    "a call takes too long": True,
    "a peer is killed during a call": True,
    "a peer is killed before a call": True,
    "a peer is killed before the first call": True,  # told by the peer that called it
    "a member never connects": True,
    "a member of a group never comes": True,
    "a member of a group falls silent": True,
    "a member of a group ends": True,
    "the store is gone": True,
    "a function raises": False,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says that forks all the scenes, each from one import of torch."""

    def run(folder: Path) -> None:
        command = [sys.executable, "-m", "tests.contracts.torch_errors", *map(str, free_ports(2))]
        done = commands.run(command, timeout=120)
        (folder / "said").write_text(done.stdout + done.stderr)

    return (made_once(tmp_path_factory, "torch-errors", run) / "said").read_text()


def test_each_of_torchs_errors_is_taken_for_what_it_is(program: str) -> None:
    lines = [line for line in _lines(program) if "name" in line]
    assert {line["name"]: line["lost"] for line in lines} == LOST, program
    assert set(Counter(line["name"] for line in lines).values()) == {1}


def _lines(program: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program.splitlines() if line.startswith("{")]


def test_the_range_of_torch_ends_where_this_was_tested() -> None:
    """`make test-versions` runs this in the newest, too."""
    dependencies = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (required,) = [one for one in dependencies if one.name == "torch"]
    tested = {pair.torch for pair in versions.PAIRS}
    newest = max(map(Version, tested))
    assert all(version in required.specifier for version in tested)
    assert f"{newest.major}.{newest.minor + 1}.0" not in required.specifier
    assert "2.9.9" not in required.specifier  # see pyproject.toml
    installed = Version(torch.__version__)
    assert installed.is_devrelease or installed.base_version in required.specifier


def test_the_package_the_readme_and_the_workflow_name_the_versions_that_are_tested() -> None:
    pythons = sorted({pair.python for pair in versions.PAIRS}, key=Version)
    torches = sorted({pair.torch.rpartition(".")[0] for pair in versions.PAIRS}, key=Version)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert [one.rpartition(" ")[2] for one in classifiers if "Python :: 3" in one] == pythons
    said = f"Python {pythons[0]} to {pythons[-1]} and torch {torches[0]} to {torches[-1]}"
    assert said in (ROOT / "README.md").read_text()
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert {*pythons} <= {*jobs["test"]["strategy"]["matrix"]["python"]}
    run = {versions.Pair(**each) for each in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert run == {*versions.PAIRS[1:]}  # the first is what `make test` has


def test_optimizers_and_ddp_do_not_import_the_compiler_and_compute_the_same(program: str) -> None:
    (line,) = [line for line in program.splitlines() if line.startswith("light ")]
    assert line.split()[1:] == ["False", "True", "True", "2.0"], program
