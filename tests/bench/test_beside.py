"""Six programs beside Ray's and Monarch's: Rolecall's run, and docs/beside.md says how long each is."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import rolecall
from bench.llm_lines import count

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"pi": "examples", "ps": "", "es": "", "pool": "", "first": "", "serve": "examples"}


def program(name: str, system: str) -> Path:
    if system == "rolecall" and PROGRAMS[name]:
        return ROOT / PROGRAMS[name] / f"{name}.py"
    return ROOT / "bench" / "beside" / f"{name}_{system}.py"


def lines(name: str, system: str) -> str:
    path = program(name, system)
    return str(count(path.read_text())) if path.exists() else "-"


def test_docs_say_how_long_each_is() -> None:
    rows = [row.split("|")[1:-1] for row in (ROOT / "docs" / "beside.md").read_text().splitlines() if "| " in row]
    said = {row[0].split("`")[1]: [cell.strip() for cell in row[1:4]] for row in rows if "`" in row[0]}
    assert said == {name: [lines(name, system) for system in ("rolecall", "ray", "monarch")] for name in PROGRAMS}


@pytest.mark.parametrize(
    ("name", "settings", "value", "most"),
    [
        ("ps", {"updates": 300}, "error", 0.3),
        ("first", {"updates": 300}, "error", 0.3),
        ("es", {"updates": 60}, "reward", 0.0),
        ("pool", {}, "sum", 59_401),
    ],
)
def test_ours_runs(name: str, settings: dict[str, Any], value: str, most: float, tmp_path: Path) -> None:
    module = runpy.run_path(str(program(name, "rolecall")))
    result = rolecall.run(module["JOB"], in_process=True, checkpoint_dir=tmp_path, **settings)
    assert result[value] <= most
    if name == "es":
        assert result[value] > -0.5
    if name == "pool":
        assert result[value] == sum(sum(n % 7 for n in range(item)) for item in range(200))
