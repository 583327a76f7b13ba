"""A job that failed for good: FAILED is on disk, holds for rank 0 when it is started again, and until what changes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.__main__ import main
from rolecall.config import Settings, __version__
from rolecall.declare import describe
from rolecall.errors import FAILED, USAGE, UsageError
from rolecall.gang.protocol import Budget, Effect, Verdict
from rolecall.rank.coordinator import Coordinator
from rolecall.record import history, rundir
from rolecall.record.history import Point, Start
from rolecall.record.rundir import Persisted
from tests.loops import in_a_loop
from tests.ports import free_ports

NODE = "agent-0:8000"
REASON = "worker of observer_0 killed by SIGKILL 5 times at step 312; out of memory?"
VERDICT = Verdict(REASON, FAILED)


@contextlib.asynccontextmanager
async def rank_0(directory: Path, *flags: str, node: str = NODE, **settings: Any) -> AsyncIterator[Coordinator]:
    """The coordinator of `rl` with these flags of the job and settings of every job; it ends as one that was killed."""
    (port,) = free_ports(1)
    shared = Settings(job="rl", checkpoint_dir=directory, bind_addr="127.0.0.1", port=port, **settings)
    lead = Coordinator(describe.describe("rl", flags), shared, "first", node)
    try:
        await lead.start(telemetry.build(telemetry.COORDINATOR, CollectorRegistry()))
        yield lead
    finally:
        await lead.stop(ended=False)


async def fail(directory: Path, *flags: str, **settings: Any) -> None:
    async with rank_0(directory, *flags, **settings) as lead:
        assert lead.gang.state == "gathering"
        assert await lead.files.persist(Effect("begin", 4, (("agent", 0),), budget=Budget(312, 300, 4)))
        assert await lead.files.persist(Effect("failed", verdict=VERDICT))


async def state(directory: Path, *flags: str, **settings: Any) -> tuple[str, str, int, bool]:
    async with rank_0(directory, *flags, **settings) as lead:
        return lead.gang.state, lead.gang.reason, lead.gang.code, (directory / rundir.FAILED).exists()


ANEW = ("gathering", "", 0, False)


@in_a_loop
async def test_it_stays_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await fail(tmp_path)
    for _ in range(2):
        assert await state(tmp_path, log_level="debug") == ("failed", REASON, FAILED, True)
    said = capsys.readouterr().out
    assert "this job has failed for good: change a setting, or run `rolecall resume " in said
    assert "to start again; RESUME=0" in said  # there is no checkpoint to train on from
    assert REASON in said
    kept = json.loads((tmp_path / rundir.FAILED).read_text())
    assert (kept["reason"], kept["code"]) == (REASON, FAILED)


@pytest.mark.parametrize(
    ("flags", "settings", "version"),
    [
        (("--lr", "0.5"), {}, __version__),
        ((), {"max_restarts": 50}, __version__),
        ((), {"rpc_timeout": 99.0}, __version__),
        ((), {}, "9.9"),
    ],
)
@in_a_loop
async def test_a_changed_setting_or_version_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], settings: dict[str, Any], version: str
) -> None:
    await fail(tmp_path)
    (tmp_path / "checkpoint-000003-0000000300.pt").write_text("")
    monkeypatch.setattr(describe, "__version__", version)
    assert await state(tmp_path, *flags, **settings) == ANEW
    assert (tmp_path / "checkpoint-000003-0000000300.pt").exists()
    assert await state(tmp_path) == ANEW


@in_a_loop
async def test_resume_0_starts_anew_but_not_for_ever(tmp_path: Path) -> None:
    await fail(tmp_path)
    (tmp_path / "checkpoint-000003-0000000300.pt").write_text("")
    await fail(tmp_path, resume=False)  # which moves the earlier run aside first
    assert not (tmp_path / "checkpoint-000003-0000000300.pt").exists()
    assert (tmp_path / "earlier-000004" / rundir.FAILED).exists()
    assert (await state(tmp_path, resume=False))[0] == "failed"  # this very rank, restarted by its container
    assert await state(tmp_path, resume=False, node="another:8000") == ANEW


@in_a_loop
async def test_one_command_clears_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new budget of restarts."""
    for words in ([str(tmp_path)], []):
        await fail(tmp_path)
        assert main(["resume", *words]) == 0
        assert REASON in capsys.readouterr().out
        async with rank_0(tmp_path) as lead:
            assert lead.gang.state == "gathering"
            assert lead.gang.budget.fruitless <= 1
        monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path))  # as in a pod
    assert main(["resume"]) == 0  # there is nothing to clear
    assert main(["resume", str(tmp_path / "nowhere")]) == USAGE


@in_a_loop
async def test_a_finished_job_says_how_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with rank_0(tmp_path) as lead:
        assert await lead.files.persist(Effect("begin", 1, (("agent", 0),)))
        assert await lead.files.persist(Effect("done", summary={"steps": 7}))
    assert (await state(tmp_path))[0] == "finished"
    (tmp_path / rundir.DONE).unlink()
    assert (await state(tmp_path))[0] == "gathering"
    assert f"delete {tmp_path / rundir.DONE}" in capsys.readouterr().out


@in_a_loop
async def test_the_budget_outlives_rank_0(tmp_path: Path) -> None:
    spent = Budget(312, 0, 3, 8.0, {"trainer_0 was started again": 3})
    async with rank_0(tmp_path) as lead:
        assert await lead.files.persist(Effect("begin", 1, (("agent", 0),), budget=spent))
    async with rank_0(tmp_path) as lead:  # rank 0 was killed
        assert lead.gang.budget.fruitless == 4
        await lead.stop(ended=True)
    async with rank_0(tmp_path) as lead:  # it had ended in order
        assert lead.gang.budget.fruitless == 4
    (tmp_path / "checkpoint-000001-0000000400.pt").write_text("")
    async with rank_0(tmp_path) as lead:
        assert lead.gang.budget == Budget(400, 400)


@in_a_loop
async def test_a_disk_that_refuses_the_verdict_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the members are told all the same is a script's rule."""

    def broken(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with rank_0(tmp_path) as lead:
        with monkeypatch.context() as patched:
            patched.setattr(rundir, "write_atomically", broken)
            assert not await lead.files.persist(Effect("failed", verdict=VERDICT))
    assert "FAILED cannot be written; a restart would train on" in capsys.readouterr().out
    assert not (tmp_path / rundir.FAILED).exists()


@pytest.mark.parametrize("effect", [Effect("done", summary={}), Effect("failed", verdict=VERDICT)])
@in_a_loop
async def test_a_run_that_is_over_on_disk_has_its_history_there(tmp_path: Path, effect: Effect) -> None:
    """A rank 0 that is killed next, before its report, writes the report from that."""

    async with rank_0(tmp_path) as lead:
        lead.files.journal.record([Start(1, 0), Point("score", 7, 0.5, 1.0)])
        assert await lead.files.persist(effect)
        assert [point.value for point in history.read(tmp_path).curves["score"]] == [0.5]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"reason": 1, "code": "x", "settings": "", "when": 0}'])
def test_a_damaged_verdict(tmp_path: Path, text: str) -> None:
    (tmp_path / rundir.FAILED).write_text(text)
    with pytest.raises(UsageError, match="is damaged; delete it to train on from the newest checkpoint"):
        rundir.read_failed(tmp_path)


def test_a_damaged_budget(tmp_path: Path) -> None:
    rundir.write_generation(tmp_path, Persisted(3, "rl", (), "", Budget(1, 2, 3, 4.0, {"x": 1})))
    assert rundir.read_generation(tmp_path).budget == Budget(1, 2, 3, 4.0, {"x": 1})
    path = tmp_path / rundir.GENERATION
    for spoilt in ([], {"fruitless": "many"}, {"seen": 3}):
        path.write_text(json.dumps({**json.loads(path.read_text()), "budget": spoilt}))
        with pytest.raises(UsageError, match="is damaged"):
            rundir.read_generation(tmp_path)
