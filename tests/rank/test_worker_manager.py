"""What a rank's supervisor does with its workers; tests/life has the rules."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.task import Task
from rolecall.errors import UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import Directive, Join, WorkerStatus
from rolecall.rank import fork_server, worker, worker_process
from rolecall.rank.worker_process import WorkerProcess
from tests.rank.managed import JOB, Rank, obeys

# the end of a fork server in this process
pytestmark = pytest.mark.filterwarnings("ignore:resource_tracker. process died unexpectedly")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(worker_process, "_run", obeys)

    def play(steps: Callable[[Rank], Awaitable[Any]], **settings: Any) -> Any:
        async def begin() -> Any:
            rank = Rank(tmp_path, **settings)
            try:
                return await steps(rank)
            finally:
                await rank.workers.close()

        return asyncio.run(begin())

    return play


def test_one_process_is_a_part_of_one_generation_after_another(play: Any) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("load", 1, join=2)
        await rank.state("ready")
        pid = rank.worker.pid
        await rank.act("attach", 1, join=2)
        await rank.state("running")
        await rank.act("detach", 2)
        assert rank.workers.core.status() == WorkerStatus(1, "ready", "stopped", join=2)
        await rank.act("attach", 2)
        await rank.state("running")
        assert (rank.worker.pid, rank.workers.core.status()) == (pid, WorkerStatus(2, "running"))
        assert rank.count("worker_attach_seconds_count") == 2
        os.kill(pid, signal.SIGSTOP)  # it does not leave, and is killed
        rank.workers.detach(0.2, "rank 0 does not answer")
        await rank.state("ended")
        assert rank.workers.core.status() == WorkerStatus(2, "ended", "stopped")

    play(steps)


def test_a_spare_takes_over_and_another_is_loaded(play: Any, tmp_path: Path, logged: list[EventDict]) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.state("running")
        first = rank.worker
        await rank.until(lambda: rank.count("spare_workers") == 2)
        workers = [first, *rank.spares]
        folders = [tmp_path, tmp_path / "worker-1", tmp_path / "worker-2"]
        assert [worker.task.directory for worker in workers] == folders
        assert len({worker.task.stacks for worker in workers}) == 3
        pids = [spare.pid for spare in rank.spares]
        os.kill(first.pid, signal.SIGKILL)
        await rank.state("ended")
        await rank.act("start", 1, join=1, joined=(Join("observer", 1, 1),))
        await rank.state("running")
        assert rank.worker.pid == pids[0]
        await rank.until(lambda: rank.count("spare_workers") == 2)
        assert (rank.count("worker_starts_total"), rank.count("worker_attaches_total")) == (1, 1)
        await rank.workers.carry_out(Action("end", Directive("finished", 1, 4, role="observer")))
        assert (rank.spares, rank.count("spare_workers")) == ([], 0)

    play(steps, spares=2)
    assert [event["event"] for event in logged if event["log_level"] == "warning"] == ["worker ended"]


def test_a_spare_that_cannot_be_made_is_put_off(
    play: Any, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    pipe, calls = fork_server.context.Pipe, itertools.count()

    def make_pipe() -> Any:
        if next(calls) == 1:
            raise OSError("too many open files")
        return pipe()

    monkeypatch.setattr(fork_server.context, "Pipe", make_pipe)

    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until(lambda: rank.count("spare_workers") == 1)
        await rank.act("detach", 2)  # the others are not affected
        assert rank.workers.core.status().state == "ready"

    play(steps, spares=1, rejoin_interval=0.1)
    assert [event["cause"] for event in logged if event["event"] == "spare worker ended"] == ["too many open files"]


def test_a_pause_counts_for_no_deadline(play: Any) -> None:
    """Whatever the supervisor does first after it."""

    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.state("running")
        rank.workers.detach(1.0, "rank 0 does not answer")
        time.sleep(2)  # noqa: ASYNC251
        rank.workers.detach(60, "rank 0 does not answer")
        assert rank.workers.core.status().state == "leaving"
        await rank.state("ready")

    play(steps)


def test_spares_of_a_role_that_does_not_stay_are_warned_of_once(play: Any, logged: list[EventDict]) -> None:
    async def steps(rank: Rank) -> None:
        rank.workers.job = replace(JOB, roles=tuple(replace(role, stays=False) for role in JOB.roles))
        for generation in (1, 2):
            await rank.act("start", generation)
            await rank.state("running")
            assert not rank.spares
            await rank.act("end", generation)

    play(steps, spares=1)
    assert len([event for event in logged if event["event"].startswith("SPARES=1: has no effect, ")]) == 1


@pytest.mark.parametrize(("held_mb", "problem"), [(900, ""), (1100, "uses 1100 MB of memory, over max_memory_mb=1000")])
def test_worker_that_exceeds_its_memory_fails(
    play: Any, monkeypatch: pytest.MonkeyPatch, held_mb: int, problem: str
) -> None:
    monkeypatch.setattr(WorkerProcess, "resident_bytes", lambda _: held_mb * 10**6)

    async def steps(rank: Rank) -> None:
        rank.workers.job = replace(JOB, roles=tuple(replace(role, max_memory_mb=1000) for role in JOB.roles))
        await rank.act("start", 1)
        await rank.state("running")
        rank.workers.limit_memory()
        if problem:
            await rank.state("ended")
        status = rank.workers.core.status()
        assert (status.outcome, status.error) == (("failed", f"{problem} of its role") if problem else ("", ""))

    play(steps)


def test_each_role_asks_for_its_own_data() -> None:
    """Whether it has its role from ROLE, or by RANK and WORLD_SIZE, or from the gang: `settings.role` is empty then."""
    job = registry.get("rnn")

    def check(role: str) -> str:
        task = Task("rnn", Settings(job="rnn"), role, 0, check=True, values={"corpus": "/nowhere"})
        return worker.check(worker.Host(task), job).outcome

    assert check("ps") == "finished"  # it needs no corpus
    assert check("") == "finished"  # nobody knows yet
    with pytest.raises(UsageError, match="CORPUS=/nowhere: no such file or folder"):
        check("trainer")


# ---- directives that make no sense


def test_directive_for_no_member_is_refused(play: Any) -> None:
    action = Action("start", Directive("run", 1, 2, 3, (("agent", 0),), role="observer"))
    with pytest.raises(
        UsageError, match=r"^rank 0 assigns observer_1, who is no member of generation 3; run the same ver"
    ):
        play(lambda rank: rank.workers.carry_out(action))


def test_unknown_role_is_refused() -> None:
    task = Task("rnn", Settings(job="rnn"), "observer", 0)
    with pytest.raises(
        UsageError, match=r"^this version of the job has no role 'observer'; run the same version in eve"
    ):
        worker.role_of(task, registry.get("rnn"))
