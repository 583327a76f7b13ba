"""Checkpoints of format 1, whose values had other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from rolecall import Context, Job, Peer, Role, Settings, UsageError, telemetry
from rolecall.job import checkpoint
from rolecall.job.checkpoint import Checkpoints


def context(directory: Path) -> Context[Settings]:
    me, metrics = Peer("agent", 0, 0), telemetry.build(telemetry.WORKER, CollectorRegistry())
    job, checkpoints = Job([Role("agent", print)]), Checkpoints(directory, "rl", 2)
    return Context(Settings(), me, (me,), 2, metrics, job, checkpoints=checkpoints)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a checkpoint of format 1 after step 3."""
    save = torch.save

    def flat(content: dict[str, Any], file: Any) -> None:
        save({**content["state"], "settings": {}, "seconds": 2.5}, file)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", 1)
        patched.setattr(torch, "save", flat)
        Checkpoints(tmp_path, "rl", 1).write(3, {"samples": 17, "last": 1.5})
    return tmp_path


def test_what_it_has_under_the_same_name_is_restored(earlier: Path) -> None:
    resumed = context(earlier)
    assert resumed.restore({"samples": 0}) == {"samples": 17}
    assert list(resumed.steps(5)) == [4, 5]


def test_it_is_refused_where_it_lacks_a_value(earlier: Path) -> None:
    with pytest.raises(UsageError, match=r"^checkpoint-000001-0000000003.pt: was written by .*, without score; finish"):
        context(earlier).restore({"samples": 0, "score": 0.0})
