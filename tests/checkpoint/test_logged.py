"""A share whose checkpoints hold what changed: how files of an earlier one become a part of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall import LoggedShare
from rolecall.checkpoint import checkpoint, logged
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.errors import CallTimeoutError
from rolecall.wire.future import Future
from tests.checkpoint.test_shards import TOTAL, Gang, failures


class Logged(Gang):
    """One member that writes through rank 0, four files for all rows."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1, folders=True)
        (share,), ((self.weight, _, _),) = self.shares, self.weights
        self.share = LoggedShare(share.context, "model", share._rows, lambda rows: {"weight": self.weight[rows]})
        self.links, self.hangs, self.call = list[str](), False, self.calls.call
        self.calls.call = self.linked  # type: ignore[method-assign]

    def linked(self, to: str, request: Any, deadline: Any, **options: Any) -> Future[Any]:
        if request.method != "link":
            return self.call(to, request, deadline, **options)
        self.links.append(request.args[2])
        if not self.hangs:
            return self.call(to, request, deadline, **options)
        answer: Future[Any] = Future()
        answer.set_exception(CallTimeoutError("link is not done after 60 s"))
        return answer

    def train(self, step: int) -> None:
        self.share.before_rows(torch.tensor([step]))
        self.weight[step] = step
        self.save(step)


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Logged:
    monkeypatch.setattr(logged, "FILE", TOTAL // 4 * 12)
    return Logged(tmp_path)


def test_each_file_is_linked_by_a_call_of_its_own(gang: Logged) -> None:
    gang.train(1)
    gang.train(2)
    assert gang.links == [f"model-ps_0.checkpoint-000001-0000000001.000{number}.safetensors" for number in range(4)]


def test_after_a_link_that_takes_too_long_all_rows_are_written(gang: Logged, tmp_path: Path) -> None:
    gang.train(1)
    gang.hangs = True
    gang.train(2)
    assert failures(gang) == 1
    gang.train(3)
    assert [path.stem[-1] for path in checkpoint.newest_first(tmp_path)] == ["3", "1"]
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], gang.weight)
