"""A supervisor's handle on its worker: the outcome of a worker that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.job.task import Peer, Task
from rolecall.rank import worker_process
from rolecall.rank.worker_process import WorkerProcess

TASK = Task("rl", Settings(job="rl"), Peer("agent", 0, 0))


def sleeps(task: Task, connection: Any) -> None:
    time.sleep(60)  # longer than the test; it is killed


def test_a_worker_that_was_killed_was_not_stopped_by_who_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directive to end the worker comes while the supervisor reads its exit code."""
    monkeypatch.setattr(worker_process, "_run", sleeps)

    async def outcome() -> str:
        ended, killed = asyncio.Event(), threading.Event()
        worker = WorkerProcess(TASK, lambda: None)
        await worker.start()
        join, exited = worker._process.join, worker._exited

        def joins(timeout: float) -> None:
            assert killed.wait(30)
            join(30)

        def exits() -> None:
            exited()
            ended.set()

        worker._process.join = joins  # type: ignore[method-assign]
        asyncio.get_running_loop().add_reader(worker._pidfd, exits)
        os.kill(worker._pid, signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), 30)
        worker.kill("stopped")
        killed.set()
        await asyncio.wait_for(worker.ended.wait(), 30)
        return worker.outcome

    assert asyncio.run(outcome()) == "killed"
