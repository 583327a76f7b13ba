"""The jobs that a user starts from: pi, and what `rolecall new` writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rolecall import new, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.context.context import Context
from rolecall.declare.loader import load_file
from rolecall.declare.task import Attachment, Peer
from rolecall.errors import Drained, PeerLostError
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

ROOT = Path(__file__).parents[2]


class Answers:
    """A transport whose calls are answered at once by `target`, until the last peer is lost while a drain is
    ordered."""

    def __init__(self, context: Context[Any], target: object, answered: int) -> None:
        self.context, self.target, self.left = context, target, answered

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.left:
            self.left -= 1
            answer.set_result(getattr(self.target, request.method)(*request.args))
        else:
            self.context.drain()
            self.context.give_up(to)
            answer.set_exception(PeerLostError(f"{to} does not answer: it was lost"))
        return answer

    def lose(self, peer: Peer) -> None:
        pass


@pytest.mark.parametrize("which", ["examples/pi.py", "rolecall new"])
def test_a_step_whose_workers_were_all_lost_is_no_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    """Earlier steps have left results; this one has none."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    path = ROOT / which if which.endswith(".py") else new.write("blocks", tmp_path)[0]
    job = load_file(path).JOB
    lead, worker = (role.name for role in job.roles)
    sys.modules.pop(path.stem)
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run", "job", 1)
    members = (Peer(lead, 0, 0), Peer(worker, 0, 1))
    metrics = telemetry.build(telemetry.WORKER, CollectorRegistry())
    context = Context(job.settings(), Attachment(1, members[0], members), metrics, job, checkpoints=checkpoints)
    worker_context = Context(job.settings(), Attachment(1, members[1], members), metrics, job)
    context.group.use(Answers(context, job.roles[1].run(worker_context), answered=2))
    with pytest.raises(Drained):
        job.roles[0].run(context)
    snapshot = checkpoints.newest()
    assert snapshot is not None
    assert snapshot.step == 2
