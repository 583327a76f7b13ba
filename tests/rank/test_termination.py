"""The message of a container that has ended: what `kubectl describe pod` shows of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolecall import __main__
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.declare.registry import Identity
from rolecall.errors import FAILED, USAGE
from rolecall.gang.protocol import Directive
from rolecall.rank import start, termination

TRACEBACK = 'Traceback (most recent call last):\n  File "pi.py", line 3, in lead\nValueError: bad value\n'


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that kubelet mounts."""
    file = tmp_path / "termination-log"
    file.write_text("of an earlier process")
    monkeypatch.setattr(termination, "FILE", file)
    return file


def ends(monkeypatch: pytest.MonkeyPatch, code: int, directive: Directive | None) -> int:
    """A rank whose supervisor ends so."""

    class Ended:
        member = SimpleNamespace(directive=directive, hurried=False)

        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def run(self) -> int:
            return code

    monkeypatch.setattr(start, "Supervisor", Ended)
    return start.run(describe.describe("rnn"), Settings(job="rnn", tls="off"), Identity("trainer", 0))


@pytest.mark.parametrize(
    ("reason", "first"),
    [(TRACEBACK, "the job failed: ValueError: bad value"), ("waited 9 s for ps", "the job failed: waited 9 s for ps")],
)
def test_any_rank_of_a_failed_job_says_why_in_its_first_line(
    message: Path, monkeypatch: pytest.MonkeyPatch, reason: str, first: str
) -> None:
    assert ends(monkeypatch, FAILED, Directive("failed", 0, 2, role="trainer", reason=reason, code=FAILED)) == FAILED
    assert message.read_text().splitlines()[0] == first
    assert (TRACEBACK.strip() in message.read_text()) == (reason == TRACEBACK)


def test_a_rank_that_ends_well_leaves_no_message(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, 0, Directive("finished", 0, 2, role="trainer")) == 0
    assert message.read_text() == ""


def test_bad_input_is_the_message(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB", "rnn")
    monkeypatch.setenv("LEASE_SECONDS", "soon")
    assert __main__.main(["rank"]) == USAGE
    assert message.read_text().startswith("rolecall: wrong settings: LEASE_SECONDS")


def test_where_there_is_no_such_file_none_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(termination, "FILE", tmp_path / "termination-log")
    termination.write("rolecall: bad input")
    assert not [*tmp_path.iterdir()]
