"""The servers' shards of `ps` as one model: checkpoints, for any number of servers, and those of other jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.checkpoint import capture
from rolecall.checkpoint.checkpoint import read
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.lead import ShardedModel
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.messages import GradientPart, UpdateShard
from tests.integration import learning
from tests.jobs.ps_calls import HERE, Gang, trainer_id

KEY = Key(trainer_id(0), 1)
CHOSEN: list[dict[str, Any]] = [{"momentum": 0.9}, {"momentum": 0}, {"optimizer": "adam", "lr": 0.01}]


class Job(Gang):
    """Servers, and their model."""

    def __init__(self, directory: Path, servers: int, **chosen: Any) -> None:
        super().__init__(PsSettings(job="ps", servers=servers, checkpoint_dir=directory, **chosen), directory=directory)
        self.whole, self.context = ShardedModel(self.lead.context, self.lead), self.lead.context

    def restore(self) -> None:
        self.context.restore({"model": self.whole})

    def save(self, version: int) -> None:
        self.context.save(version, {"model": self.whole})
        self.context.finish(state={})

    def step(self, version: int) -> None:
        gradient = torch.randn(self.lead.shard.total, generator=torch.Generator().manual_seed(version))
        for server in self.servers:
            for part, extent in server.shard.parts.items():
                mine = gradient[server.shard.start + extent.start : server.shard.start + extent.stop]
                server.exchange(GradientPart(KEY, part, mine.clone(), None))
        self.whole.update(UpdateShard(version, {KEY: 1.0}, 1.0, (KEY,)), {})

    def state(self) -> dict[str, list[Tensor]]:
        shares = [server.shard.rows() for server in self.servers]
        return {name: [rows[name].copy(0, len(rows[name])) for rows in shares] for name in shares[0]}


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    """Updates go on while the checkpoint is written."""
    monkeypatch.setattr(capture.Capture.__init__, "__defaults__", (0.2, 2**16, 0, 2**20))  # copies nothing at once
    first = Job(tmp_path, 2, **chosen)
    first.restore()
    for version in (1, 2):
        first.step(version)
    first.whole.buffers = (torch.arange(3),)
    saved = first.state()
    first.context.save(2, {"model": first.whole}, drain=False)
    for version in (3, 4):
        first.step(version)
    assert first.context.require_saver().wait(60)
    second = Job(tmp_path, 2, **chosen)
    second.restore()
    torch.testing.assert_close(second.state(), saved, rtol=0, atol=0)
    assert torch.equal(second.whole.buffers[0], torch.arange(3))
    for version in (3, 4):
        second.step(version)
    torch.testing.assert_close(second.state(), first.state(), rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after", "chosen"), [(1, 3, CHOSEN[0]), (3, 1, CHOSEN[1]), (3, 2, CHOSEN[2])])
def test_its_state_is_restored_to_any_number_of_servers(
    tmp_path: Path, before: int, after: int, chosen: dict[str, Any]
) -> None:
    first = Job(tmp_path, before, **chosen)
    initial = first.whole.parameters()
    first.step(1)
    whole = {name: torch.cat(parts) for name, parts in first.state().items()}
    assert not torch.equal(whole["parameters"], initial)
    first.save(1)
    second = Job(tmp_path, after, **chosen)
    assert torch.equal(second.whole.parameters(), initial)
    second.restore()
    for name, parts in second.state().items():
        if name != "step":
            assert torch.equal(torch.cat(parts), whole[name])
    snapshot = read(tmp_path / "checkpoint-000001-0000000001.pt", "ps").whole()
    assert torch.equal(snapshot.state["model"]["parameters"], whole["parameters"])


LOCAL, SGD, ADAM = {"update_mode": "local"}, {"optimizer": "sgd"}, {"optimizer": "adam"}


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (ADAM, SGD, "UPDATE_MODE=sync OPTIMIZER=sgd: the newest checkpoint in CHECKPOINT_DIR has another optimizer"),
        (SGD, ADAM, "UPDATE_MODE=sync OPTIMIZER=adam: the newest checkpoint"),
        (SGD, LOCAL, "UPDATE_MODE=local: the newest checkpoint"),
        (LOCAL, SGD, "UPDATE_MODE=sync OPTIMIZER=sgd: the newest checkpoint"),
        (SGD, {"momentum": 0}, ""),
        (LOCAL, LOCAL, ""),
    ],
)
def test_another_jobs_state_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], problem: str
) -> None:
    """A momentum of gradients is none of differences. One that is no longer used is taken, and not kept."""
    first = Job(tmp_path, 1, model=HERE + "small", **before)
    first.step(1)
    first.save(1)
    second = Job(tmp_path, 1, model=HERE + "small", **after)
    if problem:
        with pytest.raises(UsageError, match=problem):
            second.restore()
        return
    second.restore()
    torch.testing.assert_close(second.state(), first.state(), rtol=0, atol=0)
    second.step(2)
    assert (second.state().keys() == {"parameters"}) == (after.get("momentum") == 0)


def test_a_model_whose_code_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Job(tmp_path, 1, model=HERE + "small")
    first.save(1)
    monkeypatch.setattr(learning, "small", learning.normed)
    with pytest.raises(UsageError, match=r"MODEL=.*small: has 162 parameters, the newest checkpoint .* 130;"):
        Job(tmp_path, 1, model=HERE + "small").restore()
