"""How a worker ends, by what its role raised."""

from __future__ import annotations

from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

from rolecall import CallTimeoutError, PeerLostError, ProgramError, RemoteError, UsageError
from rolecall.config import Settings
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.rank.pipe_messages import Result
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


@pytest.mark.parametrize(("problem", "result"), RAISED, ids=lambda value: type(value).__name__)
def test_fail_says_what_was_raised(
    monkeypatch: pytest.MonkeyPatch, problem: str | BaseException, result: Result
) -> None:
    ended: list[Any] = []

    def end(self: WorkerEnd, result: Result | None = None) -> NoReturn:
        ended.append(result)
        raise SystemExit

    monkeypatch.setattr(WorkerEnd, "end", end)
    worker = WorkerEnd(
        MagicMock(), Task("rl", Settings(job="rl"), "observer", 0, attachment=Attachment(1, ONE, (ONE,))), None
    )
    with pytest.raises(SystemExit):
        worker.fail(problem)
    assert ended == [result]
