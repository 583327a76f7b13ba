"""Progress of long work: a bar on a terminal, elsewhere lines of the log."""

from __future__ import annotations

import sys

import pytest
from structlog.typing import EventDict

from rolecall.context import progress_bar
from rolecall.context.progress_bar import progress, track


@pytest.mark.parametrize(("seconds", "lines"), [(10.0, []), (0.0, ["1/2 parts", "2/2 parts"])])
def test_long_work_is_logged(
    monkeypatch: pytest.MonkeyPatch, logged: list[EventDict], seconds: float, lines: list[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(progress_bar, "LOG_SECONDS", seconds)
    assert list(track(["a", "b"], "counting", unit="parts")) == ["a", "b"]
    assert [(event["event"], event["done"]) for event in logged] == [("counting", done) for done in lines]


def test_a_terminal_shows_a_bar_that_is_erased(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("loading", 100) as advance:
        advance(40)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading" in shown.err
    assert shown.err.rpartition("loading")[2].endswith("\x1b[2K")
