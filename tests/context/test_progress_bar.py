"""How far long work is: on a terminal, elsewhere, and in a worker's log."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from structlog.typing import EventDict

from rolecall.context import progress_bar
from rolecall.context.progress_bar import ProgressBar, track

DEADLINE = 30.0  # a fail-safe


class Stream(io.StringIO):
    """In place of standard error."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Standard error; a terminal where the parameter says so."""
    stream = Stream(getattr(request, "param", False))
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=stream))  # pytest sets sys.stderr itself
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return stream


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "PERIOD", 0.01)


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "progress"]


def test_short_work_writes_nothing(stream: Stream) -> None:
    assert list(track([1, 2, 3], "counting")) == [1, 2, 3]
    assert stream.getvalue() == ""
    assert threads() == []


@pytest.mark.usefixtures("quick")
def test_long_work_writes_lines(stream: Stream) -> None:
    """Also while nothing advances, and one at its end."""
    with ProgressBar("exporting", 1000, "batches") as bar:
        until(lambda: "exporting: 0/1,000 batches (0%), 0 s\n" in stream.getvalue())
        bar.advance(250)
        until(lambda: "exporting: 250/1,000 batches (25%), 0 s, " in stream.getvalue())
        bar.reach(1000)
    assert stream.getvalue().splitlines()[-1] == "exporting: 1,000/1,000 batches (100%), done in 0 s"
    assert threads() == []


@pytest.mark.usefixtures("quick")
def test_work_that_fails_is_not_done(stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError), ProgressBar("exporting") as bar:  # noqa: PT012
        bar.advance()
        until(stream.getvalue)
        raise ZeroDivisionError
    assert "exporting: 1, 0 s\n" in stream.getvalue()
    assert "done" not in stream.getvalue()
    assert threads() == []


@pytest.mark.parametrize(
    ("done", "total", "amount"),
    [
        (0, 900, "0/900 B"),
        (1_200_000, 9_912_422, "1.2/9.9 MB"),
        (1500, None, "1.5 kB"),
        (1, 3_500_000_000, "0.0/3.5 GB"),
    ],
)
def test_bytes_are_shown_in_their_unit(done: float, total: float | None, amount: str) -> None:
    bar = ProgressBar("loading", total, "B")
    bar.reach(done)
    assert bar._amount() == amount


@pytest.mark.usefixtures("quick")
def test_a_worker_logs(stream: Stream, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]) -> None:
    """Even where its standard error is a terminal."""
    monkeypatch.setattr(progress_bar, "_logs", False)
    stream._terminal = True
    progress_bar.log_progress()
    with ProgressBar("loading", 4, "files") as bar:
        bar.advance()
        until(lambda: [event for event in logged if "left_s" in event])
    assert stream.getvalue() == ""
    event = next(event for event in logged if "left_s" in event)
    assert event == {"event": "loading", "log_level": "info", "done": "1/4 files", "seconds": 0, "left_s": 0}
    assert logged[-1]["done"] == "1/4 files"


@pytest.mark.parametrize("stream", [True], indirect=True)
@pytest.mark.usefixtures("quick")
def test_a_terminal_shows_a_bar(stream: Stream) -> None:
    """One at a time, erased at its end; work in several threads adds up."""
    with ProgressBar("loading", 400, "files") as bar:
        workers = [threading.Thread(target=lambda: [bar.advance() for _ in range(100)]) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert bar.done == 400
        assert list(track(range(2), "within")) == [0, 1]
    shown = stream.getvalue()
    assert "loading" in shown
    assert "400/400 files" in shown
    assert "within" not in shown
    assert shown.endswith("\x1b[2K")  # erases the line
    assert list(track(iter("ab"), "next")) == ["a", "b"]
    assert "next" in stream.getvalue()


def test_an_iteration_that_is_left_ends(stream: Stream) -> None:
    for item in track(range(10), "counting"):
        if item == 2:
            break
    assert threads() == []
    assert stream.getvalue() == ""
