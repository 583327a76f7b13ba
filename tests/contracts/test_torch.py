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
from packaging.requirements import Requirement
from packaging.version import Version

from rolecall.launch.local import free_ports
from tests import commands
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]
TAKEN = {
    "a call takes too long": "late",
    "a call takes too long, to a future": "late",
    "a call takes too long, of a role": "late",
    "a call of a peer takes too long": "late",
    "a call of a peer takes too long, passed on": "late",
    "a peer is stopped": "lost",
    "a peer is killed during a call": "lost",
    "a peer is killed before a call": "lost",
    "a peer is killed before a call, to a future": "lost",
    "a peer is killed, as a peer says": "lost",
    "a peer is killed, as a peer passes on": "lost",
    "a peer is killed before the first call": "lost",  # told by the peer that called it
    "a member never connects": "lost",
    "a member of a group never comes": "lost",
    "a member of a group falls silent": "lost",
    "a member of a group ends": "lost",
    "the store is gone": "lost",
    "a function raises": "remote",
    "a function raises, to all": "remote",
    "a function raises, to a future": "remote",
    "a function raises what torch cannot make again": "remote",
    "a function raises in a future of its own": "remote",
    "a function raises at the caller itself": "remote",
    "an operator of torch raises": "remote",
    "a peer is told that a function raised": "remote",
    "a peer passes on that a function raised": "remote",
    "nobody has that name": "own",
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
    assert {line["name"]: line["taken"] for line in lines} == TAKEN, program
    assert set(Counter(line["name"] for line in lines).values()) == {1}
    by_name = {line["name"]: line for line in lines}
    for name in ("a function raises", "a function raises, to all", "a function raises, to a future"):
        assert by_name[name]["text"].endswith(" raised KeyError: 'no such thing'")
        cause = by_name[name]["cause"]
        assert ", in fails" in cause
        assert "torch/" not in cause
    text = by_name["a function raises what torch cannot make again"]["text"]
    assert text == "observer_0 raised OddError: (1, 2)"
    for name in ("a peer is told that a function raised", "a peer passes on that a function raised"):
        assert by_name[name]["text"].endswith("observer_1 raised KeyError: 'no such thing'")
        assert ", in fails" in by_name[name]["cause"]


def test_a_call_that_takes_too_long_is_told_with_what_its_peer_does(program: str) -> None:
    late = [line for line in _lines(program) if line.get("event") == "call timed out"]
    answered = [line for line in late if line["peer"] == "observer_0"]
    assert len(answered) == 3  # by each kind of call
    for line in answered:
        assert line["function"] == "waits"
        assert line["deadline_s"] == 0.6
        assert line["setting"] == "timeout=0.3 and, for its start, PHASE_TIMEOUT=0.3"
        assert ", in waits" in line["exception"]
        assert "torch/" not in line["exception"]


def test_a_peer_whose_connection_is_closed_is_given_up(program: str) -> None:
    assert [line["lost"] for line in _lines(program) if "lost" in line] == [["observer_1"]]


def _lines(program: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program.splitlines() if line.startswith("{")]


def test_the_range_of_torch_ends_where_this_was_tested() -> None:
    dependencies = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (required,) = [one for one in dependencies if one.name == "torch"]
    version = Version(torch.__version__)
    assert version.base_version in required.specifier
    assert f"{version.major}.{version.minor + 1}.0" not in required.specifier
    assert "2.9.9" not in required.specifier  # see pyproject.toml


def test_optimizers_and_ddp_do_not_import_the_compiler_and_compute_the_same(program: str) -> None:
    (line,) = [line for line in program.splitlines() if line.startswith("light ")]
    assert line.split()[1:] == ["False", "True", "True", "2.0"], program
