"""Waits for torch's futures are spans while a process records, and nothing at all while it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.record import records
from rolecall.record.recorder import recorder
from rolecall.torch_rpc import tracing

DEADLINE = 20.0  # seconds


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread is about to wait for a future."""
    event = threading.Event()
    original = getattr(torch._C.Future.wait, "__wrapped__", torch._C.Future.wait)  # another test may have it watched

    def wait(self: Any) -> Any:
        event.set()
        return original(self)

    monkeypatch.setattr(torch._C.Future, "wait", wait)  # as it was, afterwards
    return event


@pytest.fixture
def recording(tmp_path: Path, waits: threading.Event) -> Iterator[Path]:
    tracing.watch_waits()
    recorder.start(tmp_path / "ps-0-1.jsonl", {"job": "ps", "role": "ps", "ordinal": 0, "rank": 0, "generation": 1})
    yield tmp_path
    recorder.close()


def names(folder: Path) -> list[str]:
    recorder.flush()
    (recording,) = records.read(folder).recordings
    return [span.name for span in recording]


def once(waits: threading.Event, answer: Callable[[], None]) -> threading.Thread:
    """Has `answer` called once the other thread waits."""
    waits.clear()

    def call() -> None:
        assert waits.wait(DEADLINE)
        answer()

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_wait_is_one_span(recording: Path, waits: threading.Event) -> None:
    tracing.watch_waits()  # once more changes nothing
    answers: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(3)]

    def answer() -> None:
        for one in answers:
            one.set_result(7)

    thread = once(waits, answer)
    assert torch.futures.wait_all(answers) == [7, 7, 7]
    thread.join(DEADLINE)
    assert answers[0].wait() == 7
    assert names(recording) == ["wait"]
    recorder.stop()
    late: torch.futures.Future[int] = torch.futures.Future()
    thread = once(waits, lambda: late.set_result(7))
    assert late.wait() == 7
    thread.join(DEADLINE)
    assert names(recording) == ["wait"]


def test_what_a_wait_raises_passes_through(recording: Path, waits: threading.Event) -> None:
    answer: torch.futures.Future[int] = torch.futures.Future()
    gone: Any = ValueError("gone")  # the stub of torch asks for a result
    thread = once(waits, lambda: answer.set_exception(gone))
    with pytest.raises(ValueError, match="gone"):
        answer.wait()
    thread.join(DEADLINE)
    assert names(recording) == ["wait"]
