"""mypy over programs that call methods of a role: what it accepts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.timeout(400)  # without a cache it reads all of torch
def test_mypy_knows_the_arguments_and_the_answer_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # of mypy's configuration and cache
    names = [(HERE / name).relative_to(ROOT).as_posix() for name in ("members.py", "right.py", "wrong.py")]
    out, err, _ = api.run(["--strict", "--no-error-summary", "--hide-error-context", *names])
    assert err == ""
    errors = [line.split(":", 3) for line in out.splitlines() if ": error:" in line]
    lines = (HERE / "wrong.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert {(file, int(line)) for file, line, *_ in errors} == {(names[2], number) for number in wrong}, out
