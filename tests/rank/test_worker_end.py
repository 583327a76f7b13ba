"""How a worker ends, by what its role raised."""

from __future__ import annotations

import bdb
import re
import sys
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from rolecall import CallTimeoutError, PeerLostError, ProgramError, RemoteError, UsageError
from rolecall.config import Settings
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.messages.worker import Result
from rolecall.rank.worker_end import WorkerEnd

ONE = Peer("observer", 0, 1)
RAISED: list[tuple[str | BaseException, Result]] = [
    ("the disk is gone", Result("failed", "the disk is gone")),
    (UsageError("LR=-1: too small"), Result("refused", "LR=-1: too small")),
    (PeerLostError("agent_0 does not answer\nand more"), Result("lost", "agent_0 does not answer")),
    (ProgramError("ENV_ID=X: broken"), Result("failed", "ENV_ID=X: broken")),
    (ValueError("on purpose"), Result("failed", "ValueError: on purpose\n")),
    (RemoteError("agent_0 raised X"), Result("failed", "rolecall.RemoteError: agent_0 raised X\n")),
    (CallTimeoutError("late"), Result("failed", "rolecall.CallTimeoutError: late\n")),
]


def quit_pdb() -> BaseException:
    """What pdb raises as its input ends."""
    try:
        raise bdb.BdbQuit
    except bdb.BdbQuit as error:
        return error


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results that workers end with."""
    ended: list[Any] = []

    def end(self: WorkerEnd, result: Result | None = None) -> NoReturn:
        ended.append(result)
        raise SystemExit

    monkeypatch.setattr(WorkerEnd, "end", end)
    return ended


def make() -> WorkerEnd:
    return WorkerEnd(
        MagicMock(), Task("rl", Settings(job="rl"), "observer", 0, attachment=Attachment(1, ONE, (ONE,))), None
    )


def test_a_breakpoint_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch, ended: list[Any]) -> None:
    monkeypatch.setattr(sys, "breakpointhook", make().refuse_breakpoint)
    with pytest.raises(SystemExit):
        breakpoint()  # noqa: T100
    with pytest.raises(SystemExit):
        make().fail(quit_pdb())
    for result in ended:
        assert result.outcome == "refused"
        assert re.match(r"\S*test_worker_end\.py:\d+: ", result.error)
        assert "--in-process" in result.error


@pytest.mark.parametrize(("problem", "result"), RAISED, ids=lambda value: type(value).__name__)
def test_fail_says_what_was_raised(ended: list[Any], problem: str | BaseException, result: Result) -> None:
    with pytest.raises(SystemExit):
        make().fail(problem)
    assert ended == [result]
