"""What a rank's supervisor does with its worker: the check of the settings, and directives that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.typing import EventDict

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.declare.task import Task
from rolecall.errors import RankError, UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import Directive
from rolecall.rank import worker, worker_manager
from rolecall.rank.worker_manager import WorkerManager


class Process:
    """In place of a worker process: a check ends at once, with `outcome`, or where that is empty, never."""

    outcome = "finished"
    started: list[Task]

    def __init__(self, task: Task, changed: Callable[[], None], run_files: Any = None) -> None:
        self.task, self.ended, self.error, self.alive, self.killed = task, asyncio.Event(), "", True, ""
        self.state, self.generation = "starting", 1

    async def start(self, limit: float) -> None:
        self.started.append(self.task)
        if self.outcome:
            self.alive = False
            self.ended.set()

    def kill(self, outcome: str) -> None:
        self.killed = outcome

    async def dump(self) -> str:
        return "stacks"

    def log_stacks(self, text: str) -> None:
        telemetry.log().warning(text)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    kind = type("Process", (Process,), {"started": []})
    monkeypatch.setattr(worker_manager, "WorkerProcess", kind)
    return kind


def manager(directory: Path, role: str = "", **settings: Any) -> WorkerManager:
    _, metrics, files = telemetry.build_supervisor(directory, is_rank0=False)
    job = describe.describe("rnn")
    return WorkerManager(job, Settings(job="rnn", **settings), role, metrics=metrics, files=files, changed=lambda: None)


def directive(kind: Any, role: str, **values: Any) -> Action:
    return Action("end", Directive(kind, 0, 2, role=role, **values))


# ---- the check of the settings


def test_check_may_take_phase_timeout(
    tmp_path: Path, process: type[Process], logged: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_manager, "LOG_REPEAT_SECONDS", 0.02)
    process.outcome = ""
    workers = manager(tmp_path, connect_timeout=0.001, phase_timeout=0.05)
    with pytest.raises(UsageError, match=r"^the check of the settings took over PHASE_TIMEOUT=0\.05 s$"):
        asyncio.run(workers.check("trainer"))
    events = [event["event"] for event in logged]
    assert events == ["still checking the settings", "still checking the settings", "stacks"]


def test_check_that_is_killed_each_time_is_no_usage_error(tmp_path: Path, process: type[Process]) -> None:
    process.outcome = "killed"
    with pytest.raises(RankError, match=r"^the check of the settings was killed 3 times: .*raise the memory limit"):
        asyncio.run(manager(tmp_path).check("trainer"))
    assert len(process.started) == 3


def test_each_assigned_role_is_checked_once(tmp_path: Path, process: type[Process]) -> None:
    async def play() -> None:
        workers = manager(tmp_path)
        await workers.check("")
        for kind, role in (("stop", "ps"), ("stop", "ps"), ("run", "trainer"), ("leave", "other"), ("failed", "x")):
            await workers.carry_out(directive(kind, role))

    asyncio.run(play())
    assert [task.role for task in process.started] == ["", "ps", "trainer"]
    asyncio.run(manager(tmp_path, "ps").carry_out(directive("stop", "ps")))  # a rank with a role
    assert len(process.started) == 3


def test_check_is_not_fenced(tmp_path: Path, process: type[Process]) -> None:
    process.outcome = ""

    async def play() -> list[str]:
        workers = manager(tmp_path)
        check = asyncio.create_task(workers.check("ps"))
        await asyncio.sleep(0)  # it starts the check
        assert workers.worker is not None
        killed = []
        for outcome in ("stopped", "silent"):
            workers.kill(outcome)  # type: ignore[arg-type]
            killed.append(workers.worker.killed)  # type: ignore[attr-defined]
        check.cancel()
        return killed

    assert asyncio.run(play()) == ["", "silent"]


@pytest.mark.parametrize(("held_mb", "problem"), [(900, ""), (1100, "uses 1100 MB of memory, over max_memory_mb=1000")])
def test_worker_that_exceeds_its_memory_fails(
    tmp_path: Path, process: type[Process], monkeypatch: pytest.MonkeyPatch, held_mb: int, problem: str
) -> None:
    process.outcome, failed = "", list[str]()
    monkeypatch.setattr(process, "resident_bytes", lambda _: held_mb * 10**6, raising=False)
    monkeypatch.setattr(process, "fail", lambda _, problem: failed.append(problem), raising=False)

    async def play() -> None:
        workers = manager(tmp_path)
        workers.job = replace(workers.job, roles=tuple(replace(r, max_memory_mb=1000) for r in workers.job.roles))
        check = asyncio.create_task(workers.check("ps"))
        await asyncio.sleep(0)  # it starts the check
        workers.limit_memory()
        check.cancel()

    asyncio.run(play())
    assert [text.removesuffix(" of its role") for text in failed] == ([problem] if problem else [])


def test_each_role_asks_for_its_own_data() -> None:
    """Whether it has its role from ROLE, or by RANK and WORLD_SIZE, or from the gang: `settings.role` is empty then."""
    job = registry.get("rnn")

    def check(role: str) -> str:
        task = Task("rnn", Settings(job="rnn"), role, 0, check=True, values={"corpus": "/nowhere"})
        return worker.check(task, job).outcome

    assert check("ps") == "finished"  # it needs no corpus
    assert check("") == "finished"  # nobody knows yet
    with pytest.raises(UsageError, match="CORPUS=/nowhere: no such file or folder"):
        check("trainer")


# ---- directives that make no sense


def test_directive_for_no_member_is_refused(tmp_path: Path, process: type[Process]) -> None:
    action = Action("start", Directive("run", 1, 2, 3, (("ps", 0),), role="trainer"))
    with pytest.raises(
        UsageError, match=r"^rank 0 assigns trainer_1, who is no member of generation 3; run the same ver"
    ):
        asyncio.run(manager(tmp_path).carry_out(action))


def test_unknown_role_is_refused() -> None:
    task = Task("rnn", Settings(job="rnn"), "observer", 0)
    with pytest.raises(
        UsageError, match=r"^this version of the job has no role 'observer'; run the same version in eve"
    ):
        worker.role_of(task, registry.get("rnn"))


@pytest.mark.parametrize(("kind", "told"), [("finished", 0), ("stop", 1)])
def test_a_loss_is_logged_unless_the_job_has_finished(
    tmp_path: Path, process: type[Process], logged: list[EventDict], kind: str, told: int
) -> None:
    workers = manager(tmp_path, "trainer")

    async def play() -> None:
        task = Task("rnn", workers.settings, "trainer", 0)
        workers.worker = ended = worker_manager.WorkerProcess(task, lambda: None)
        ended.state, ended.outcome, ended.error, ended.alive = "ended", "lost", "EOF", False  # type: ignore[misc]
        workers._worker_changed(ended)
        await workers.carry_out(directive(kind, "trainer"))

    asyncio.run(play())
    assert [entry["event"] for entry in logged].count("worker ended") == told
