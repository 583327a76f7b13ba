"""A supervisor whose rank 0 is silent: what becomes of its worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.declare.registry import Identity
from rolecall.gang.protocol import Answer, Directive, WorkerStatus
from rolecall.messages.queries import Question
from rolecall.rank import tasks, worker_process
from rolecall.rank.supervisor import Supervisor
from rolecall.rank.worker_manager import WorkerManager
from tests.ports import free_ports
from tests.rank.managed import JOB, is_deaf, obeys

pytestmark = pytest.mark.filterwarnings("ignore:resource_tracker. process died unexpectedly")
DEADLINE = 60.0  # the fork server imports torch first
LEASE = 6.0  # between the order to detach and the fence are 1.2 s, in which a busy machine may pause the test
SILENT = 0.59 * LEASE  # the order to detach is due soon after
LOST = WorkerStatus(1, "ready", "lost", "rank 0 does not answer")


@pytest.mark.parametrize(
    ("run", "stays", "left"),
    [
        (obeys, True, LOST),
        (obeys, False, WorkerStatus(1, "ended", "stopped")),
        (is_deaf, True, WorkerStatus(1, "ended", "stopped")),
    ],
    ids=["stays", "does not stay", "does not confirm"],
)
def test_worker_leaves_its_generation_if_rank0_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Any, stays: bool, left: WorkerStatus
) -> None:
    monkeypatch.setattr(worker_process, "_run", run)

    def hear(supervisor: Supervisor, ago: float = 0.0) -> None:
        """An answer of rank 0 to what was sent `ago` seconds ago."""
        member, now = supervisor.member, time.monotonic()
        directive = Directive("run", 1, 2, 1, role="observer", stays=stays, listed=2)
        answer = Answer("rank 0", directive, members=(("agent", ((0, 0),)), ("observer", ((1, 1),))))
        request = member.start(now - ago).request
        assert request is not None
        supervisor._perform(member.answered(request, answer, now))

    async def play() -> WorkerStatus:
        supervisor = Supervisor(
            JOB, Settings(job="rl", lease_seconds=LEASE), Identity("observer", 1), tmp_path, tunnel=None
        )
        supervisor._make_metrics()
        hear(supervisor)
        running = {asyncio.create_task(supervisor._action_loop())}
        try:
            await until(supervisor, "running")
            hear(supervisor, SILENT)
            running.add(asyncio.create_task(supervisor._time_loop()))
            await until(supervisor, left.state)
            return supervisor.workers.core.status()
        finally:
            await tasks.cancel(running)
            await supervisor.workers.close()

    async def until(supervisor: Supervisor, state: str) -> None:
        async with asyncio.timeout(DEADLINE):
            while supervisor.workers.core.status().state != state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert asyncio.run(play()) == left


def test_members_are_answered_while_rank0_checks_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checking, checked = asyncio.Event(), asyncio.Event()

    async def check(*_: Any) -> None:
        checking.set()
        await checked.wait()

    async def refuse(_: Question) -> None:
        raise LookupError

    monkeypatch.setattr(WorkerManager, "check", check)
    monkeypatch.setattr(WorkerManager, "prepare", lambda _: None)
    port, metrics_port = free_ports(2)
    settings = Settings(
        job="rl",
        tls="off",
        checkpoint_dir=tmp_path,
        master_port=port,
        port=port,
        metrics_port=metrics_port,
        bind_addr="127.0.0.1",
        lease_seconds=1.5,
        rejoin_timeout=1.0,
    )

    async def play() -> None:
        lead = Supervisor(JOB, settings, Identity("agent", 0), tmp_path, tunnel=None)
        other = Supervisor(JOB, settings, Identity("observer", 1), tmp_path, tunnel=None)
        other._make_metrics()
        running = asyncio.create_task(lead.run())
        beating = set[asyncio.Task[None]]()
        try:
            await checking.wait()
            beating = {asyncio.create_task(loop) for loop in (other._heartbeat_loop(), other._time_loop())}
            await asyncio.sleep(2 * settings.rejoin_timeout)
        finally:
            await tasks.cancel(beating)
            lead._leave("the test")
            checked.set()
            await running
        assert other.member.directive is not None
        assert other.member.directive.kind == "detach"  # the job has not failed for lack of rank 0
        assert other.metrics.gang_unreachable._value.get() == 0

    asyncio.run(asyncio.wait_for(play(), DEADLINE))
