"""Waits for torch's futures are spans while a process records, and nothing at all while it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rolecall.job import waiting
from rolecall.trace import records
from rolecall.trace.recorder import recorder

DEADLINE = 20.0  # seconds


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(torch._C.Future, "wait", torch._C.Future.wait)  # as it was, afterwards
    waiting.watch()
    recorder.start(tmp_path / "ps-0-1.jsonl", {"job": "ps", "role": "ps", "ordinal": 0, "rank": 0, "generation": 1})
    yield tmp_path
    recorder.close()


def names(folder: Path) -> list[str]:
    recorder.flush()
    (recording,) = records.read(folder).recordings
    return [span.name for span in recording]


def answered_later(answers: list[torch.futures.Future[int]]) -> threading.Thread:
    """Answers once the other thread waits, which cannot be seen: a moment later."""

    def answer() -> None:
        threading.Event().wait(0.05)
        for one in answers:
            one.set_result(7)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_wait_is_a_span_once_and_an_answer_that_is_there_is_none(recording: Path) -> None:
    waiting.watch()  # once more changes nothing
    answers: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(3)]
    thread = answered_later(answers)
    assert torch.futures.wait_all(answers) == [7, 7, 7]
    thread.join(DEADLINE)
    assert answers[0].wait() == 7
    assert names(recording) == ["wait"]
    recorder.stop()
    answers = [torch.futures.Future()]
    thread = answered_later(answers)
    assert answers[0].wait() == 7
    thread.join(DEADLINE)
    assert names(recording) == ["wait"]


def test_what_a_wait_raises_passes_through(recording: Path) -> None:
    answer: torch.futures.Future[int] = torch.futures.Future()
    thread = threading.Timer(0.05, answer.set_exception, [ValueError("gone")])
    thread.start()
    with pytest.raises(ValueError, match="gone"):
        answer.wait()
    thread.join(DEADLINE)
    assert names(recording) == ["wait"]
