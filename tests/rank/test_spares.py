"""A rank's spare workers: when they load, who takes over, and what is logged of one that fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.declare.task import Task
from rolecall.gang.member import Action
from rolecall.gang.protocol import ActionKind, Directive, Join, WorkerState
from rolecall.rank import worker_process
from rolecall.rank.worker_manager import WorkerManager
from rolecall.rank.worker_process import WorkerProcess
from tests.rank.test_attach import Standin, obeys

# the end of a fork server in this process
pytestmark = pytest.mark.filterwarnings("ignore:resource_tracker. process died unexpectedly")
DEADLINE = 30.0
KEYS = ("agent", 0), ("observer", 1)
RL = describe.describe("rl")
JOB = replace(RL, roles=tuple(replace(role, stays=role.name == "observer") for role in RL.roles))


def fails_to_load(task: Task, connection: Any) -> None:
    """A spare's constructor raises, the first worker's does not."""
    if task.attachment is None:
        os._exit(1)
    Standin(task, connection).run()


class Rank:
    """The workers of observer_1."""

    def __init__(self, directory: Path, role: str = "observer", **settings: Any) -> None:
        self.registry, self.metrics, files = telemetry.build_supervisor(directory, is_rank0=False)
        self.changes = asyncio.Event()
        self.workers = WorkerManager(
            JOB,
            Settings(job="rl", **settings),
            role,
            metrics=self.metrics,
            files=files,
            changed=self.changes.set,
        )

    @property
    def worker(self) -> WorkerProcess:
        assert self.workers.worker
        return self.workers.worker

    def count(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"rolecall_{name}")

    async def act(self, kind: ActionKind, generation: int, role: str = "observer", **values: Any) -> None:
        ordinal = dict(KEYS)[role]
        directive = Directive("load" if kind == "load" else "run", ordinal, 2, generation, KEYS, role=role, **values)
        await self.workers.carry_out(Action(kind, directive))

    async def until(self, state: WorkerState) -> None:
        async with asyncio.timeout(DEADLINE):
            while self.worker.state != state:
                await self.changes.wait()
                self.changes.clear()

    async def ready(self, count: int) -> list[int]:
        """Waits for `count` ready spares; returns their processes."""
        async with asyncio.timeout(DEADLINE):
            while self.count("spare_workers") != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return [spare.pid for spare in self.workers.spare_workers]

    async def killed(self) -> None:
        os.kill(self.worker.pid, signal.SIGKILL)
        await self.until("ended")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def play(run: Any, steps: Callable[[Rank], Awaitable[Any]], **settings: Any) -> Any:
        monkeypatch.setattr(worker_process, "_run", run)

        async def begin() -> Any:
            rank = Rank(tmp_path, **settings)
            try:
                return await steps(rank)
            finally:
                await rank.workers.close()

        return asyncio.run(begin())

    return play


def test_a_spare_takes_over_and_another_is_loaded(play: Any, tmp_path: Path, logged: list[EventDict]) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until("running")
        first = rank.worker
        (spare,) = await rank.ready(1)
        await rank.killed()
        await rank.act("start", 1, join=1, joined=(Join("observer", 1, 1),))
        await rank.until("running")
        assert (rank.worker.pid, rank.worker.generation, rank.worker.join) == (spare, 1, 1)
        (another,) = await rank.ready(1)
        assert another not in (first.pid, spare)
        assert (rank.count("worker_starts_total"), rank.count("worker_attaches_total")) == (1, 1)
        assert rank.count("worker_attach_seconds_count") == 1
        await rank.killed()
        await rank.act("load", 2)
        assert (rank.worker.pid, rank.worker.status().state, rank.worker.generation) == (another, "ready", 2)
        await rank.act("attach", 2)
        await rank.until("running")
        assert first.task.directory == tmp_path

    play(obeys, steps, spares=1)
    ends = [event["event"] for event in logged if event["log_level"] == "warning"]
    assert ends == ["worker ended", "worker ended"]  # of the rank's own worker, each time


def test_spares_have_their_own_metrics_and_load_once_the_worker_runs(play: Any, tmp_path: Path) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("load", 1, join=1)
        await rank.until("ready")
        assert rank.workers.spare_workers == []
        await rank.act("attach", 1, join=1)
        await rank.until("running")
        await rank.ready(2)
        workers = [rank.worker, *rank.workers.spare_workers]
        assert [worker.task.directory for worker in workers] == [
            tmp_path,
            tmp_path / "worker-1",
            tmp_path / "worker-2",
        ]
        assert len({worker.task.stacks for worker in workers}) == 3

    play(obeys, steps, spares=2)


def test_spares_end_with_the_job_and_not_with_a_generation(play: Any) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until("running")
        spares = await rank.ready(1)
        await rank.workers.carry_out(Action("end", Directive("stop", 1, 3, role="observer")))
        assert await rank.ready(1) == spares
        await rank.workers.carry_out(Action("end", Directive("finished", 1, 4, role="observer")))
        assert rank.workers.spare_workers == []
        assert rank.count("spare_workers") == 0

    play(obeys, steps, spares=1)


def test_spares_are_those_of_the_ranks_place(play: Any) -> None:
    """The gang may assign another."""

    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until("running")
        spares = await rank.ready(1)
        await rank.workers.end()
        members = (*KEYS, ("observer", 2))
        directive = Directive("run", 2, 3, 2, members, role="observer")
        await rank.workers.carry_out(Action("start", directive))
        await rank.until("running")
        assert rank.worker.pid not in spares
        assert await rank.ready(1) != spares
        (spare,) = rank.workers.spare_workers
        assert spare.task.ordinal == 2

    play(obeys, steps, spares=1)


def test_a_spare_that_ends_is_replaced(play: Any) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until("running")
        (spare,) = await rank.ready(1)
        os.kill(spare, signal.SIGKILL)
        await rank.ready(0)
        assert await rank.ready(1) != [spare]
        assert rank.worker.state == "running"

    play(obeys, steps, spares=1, rejoin_interval=0.05)


def test_a_spare_that_fails_to_load_is_retried_with_growing_pauses(play: Any, logged: list[EventDict]) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1)
        await rank.until("running")
        async with asyncio.timeout(DEADLINE):
            while len(pauses()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert rank.worker.state == "running"

    def pauses() -> list[float]:
        return [event["retry_s"] for event in logged if event["event"] == "spare worker ended"]

    play(fails_to_load, steps, spares=1, rejoin_interval=0.05)
    assert pauses()[:3] == [0.05, 0.1, 0.2]


@pytest.mark.parametrize(("job_stays", "warnings"), [(False, 1), (True, 0)])
def test_spares_of_a_role_that_does_not_stay_are_warned_of_once(
    play: Any, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict], job_stays: bool, warnings: int
) -> None:
    async def steps(rank: Rank) -> None:
        if not job_stays:
            rank.workers.job = replace(JOB, roles=tuple(replace(role, stays=False) for role in JOB.roles))
        for generation in (1, 2):
            await rank.act("start", generation)
            await rank.until("running")
            await rank.workers.end()
        expected = 1 if job_stays else 0
        assert len(rank.workers.spare_workers) == expected

    play(obeys, steps, spares=1)
    texts = [event["event"] for event in logged if event["event"].startswith("SPARES=1: has no effect, ")]
    assert len(texts) == warnings


def test_rank0_has_no_spares(play: Any, logged: list[EventDict]) -> None:
    async def steps(rank: Rank) -> None:
        await rank.act("start", 1, role="agent")
        await rank.until("running")
        assert rank.workers.spare_workers == []

    play(obeys, steps, role="agent", spares=1)
    assert not [event for event in logged if event["event"].startswith("SPARES")]
