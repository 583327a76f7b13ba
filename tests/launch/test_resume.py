"""RESUME: an earlier run's files are moved aside whole or not at all, and numbers of generations never go back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.errors import UNSAVED, UsageError
from rolecall.gang.protocol import Beat, Directive, Effect, Heartbeat
from rolecall.jobs.rl import RlSettings
from rolecall.launch.local import free_ports
from rolecall.rank import coordinator, messages, run_files
from rolecall.rank.coordinator import Coordinator
from rolecall.record import rundir
from rolecall.record.history import Record
from rolecall.record.rundir import COORDINATOR_LOCK, DONE, GENERATION, WRITER_LOCK, Persisted, set_aside

NODE = "3b40cf1c355c:8000"
OTHER = "9d1f00c2ab11:8000"
NAMES = (
    "checkpoint-000001-0000000005.pt",
    "checkpoint-000002-0000000007.pt",
    "checkpoint-000002-0000000009.pt",
    DONE,
    "history.jsonl",
    "summary.json",
    "page.html",
    "files/tokens.json",
)
STAYS = (
    GENERATION,
    "notes.txt",
    "done",
    "DONE.old",
    ".checkpoint-000002-0000000009.pt.tmp",
    "checkpoint-000002-0000000009.pt.bak",
    "checkpoint-x-1.pt",
    "earlier-000001/checkpoint-000001-0000000001.pt",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment holds none of the variables."""
    for name in RlSettings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"this is {name}")


def contents(directory: Path) -> dict[str, str]:
    """Every file below `directory` but the locks, with what it holds."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {path.relative_to(directory).as_posix(): path.read_text() for path in files}


def expected(aside: str, moved: tuple[str, ...] = NAMES, stays: tuple[str, ...] = STAYS) -> dict[str, str]:
    return {f"{aside}/{name}": f"this is {name}" for name in moved} | {name: f"this is {name}" for name in stays}


# ---- set_aside


def test_checkpoints_and_done_are_moved_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, *NAMES, *STAYS)
    assert set_aside(tmp_path, 2, 0) == tmp_path / "earlier-000002"
    assert contents(tmp_path) == expected("earlier-000002")
    rundir.lock(tmp_path, WRITER_LOCK, 0).release()  # it is free again


class Killed(BaseException):
    """What ends a process here."""


@pytest.mark.parametrize("moved", [0, len(NAMES) - 1])
def test_interrupted_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    make(tmp_path, *NAMES, *STAYS)
    replace, left = Path.replace, iter(range(moved))

    def dying(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(Killed):
            set_aside(tmp_path, 2, 0)
    assert len([name for name in NAMES if (tmp_path / name).exists()]) == len(NAMES) - moved
    assert set_aside(tmp_path, 2, 0) == tmp_path / "earlier-000002"
    assert contents(tmp_path) == expected("earlier-000002")
    assert set_aside(tmp_path, 2, 0) is None


def test_nothing_is_moved_under_a_writers_hands(tmp_path: Path) -> None:
    make(tmp_path, *NAMES)
    before = contents(tmp_path)
    writer = rundir.lock(tmp_path, WRITER_LOCK, 0)
    with pytest.raises(UsageError, match="in use by another running job"):
        set_aside(tmp_path, 2, 0.05)
    assert contents(tmp_path) == before
    writer.release()
    assert set_aside(tmp_path, 2, 0) == tmp_path / "earlier-000002"


def file_in_the_way(directory: Path) -> None:
    (directory / "earlier-000002").write_text("")


def directory_in_the_way(directory: Path) -> None:
    (directory / "earlier-000002" / DONE / "x").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [file_in_the_way, directory_in_the_way])
def test_files_that_cannot_be_moved(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    make(tmp_path, *NAMES)
    spoil(tmp_path)
    with pytest.raises(UsageError) as refused:
        set_aside(tmp_path, 2, 0)
    said = str(refused.value)
    assert said.startswith(f"RESUME=0: files of CHECKPOINT_DIR={tmp_path} cannot be moved (")
    assert "\n" not in said
    assert "None" not in said
    assert (tmp_path / DONE).read_text() == f"this is {DONE}"
    rundir.lock(tmp_path, WRITER_LOCK, 0).release()


# ---- starts, ends and starts again


@contextlib.asynccontextmanager
async def rank_0(
    directory: Path, resume: bool, node: str = NODE, ended: bool = False, **settings: Any
) -> AsyncIterator[Coordinator]:
    """The coordinator of one agent and one observer; it ends in order, or as one that was killed."""
    values = Settings(
        job="rl",
        checkpoint_dir=directory,
        resume=resume,
        bind_addr="127.0.0.1",
        port=free_ports(1)[0],
        lease_seconds=1,
        **settings,
    )
    lead = Coordinator(describe.describe("rl", ["--observers", "1"]), values, "first", node)
    try:
        await lead.start(telemetry.build(telemetry.COORDINATOR, CollectorRegistry()))
        loops = [asyncio.create_task(loop) for loop in lead.loops()]
        yield lead
        for loop in loops:
            loop.cancel()
    finally:
        await lead.stop(ended)


async def train(lead: Coordinator) -> int:
    """Both ranks join, and the generation that starts leaves a checkpoint; returns its number."""
    directives: dict[str, Directive] = {}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{lead.settings.port}") as session:
        # who it is; that it has no worker, as it was directed; and again until the number is on disk
        for sequence in itertools.count(1):
            if "agent" in directives and directives["agent"].kind == "run":
                break
            for role, incarnation in (("observer", "second"), ("agent", "first")):
                epoch = directives[role].epoch if role in directives else 0
                digest = lead.job.agreement(lead.settings).digest
                heartbeat = Heartbeat(role, 0, incarnation, sequence, epoch=epoch, job=lead.job.identity, digest=digest)
                beat = messages.write_beat(Beat(incarnation, sequence, heartbeat=heartbeat))
                async with session.post(coordinator.PATH, data=beat) as response:
                    answer = messages.read_answer(await response.read())
                    assert answer.directive is not None
                    directives[role] = answer.directive
    number = directives["agent"].generation
    assert rundir.read_generation(lead.settings.checkpoint_dir).number == number
    make(lead.settings.checkpoint_dir, checkpoint(number))
    return number


def checkpoint(number: int) -> str:
    return f"checkpoint-{number:06d}-{number * 10:010d}.pt"


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 30))


def files(directory: Path) -> set[str]:
    return set(contents(directory)) - {GENERATION}


async def finished_run(directory: Path) -> None:
    async with rank_0(directory, resume=True, ended=True) as lead:
        assert await train(lead) == 1
        rundir.write_done(directory, {"solved": True})


@pytest.mark.parametrize("node", [NODE, OTHER])
def test_a_finished_job_starts_anew(tmp_path: Path, node: str) -> None:
    async def steps() -> None:
        await finished_run(tmp_path)
        async with rank_0(tmp_path, resume=False, node=node) as lead:
            assert lead.gang.state == "gathering"
            assert lead.gang.summary == {}
            assert files(tmp_path) == {f"earlier-000001/{checkpoint(1)}", f"earlier-000001/{DONE}"}
            assert json.loads((tmp_path / "earlier-000001" / DONE).read_text()) == {"solved": True}
            assert await train(lead) == 2

    run(steps())


@pytest.mark.parametrize("resume", [True, False])
def test_a_rank_that_was_killed_goes_on(tmp_path: Path, resume: bool) -> None:
    """Its engine starts it again with the same RESUME=0, again and again; that is the same run."""

    async def steps() -> None:
        for number in (1, 2, 3):
            async with rank_0(tmp_path, resume=resume) as lead:
                assert files(tmp_path) == {checkpoint(earlier) for earlier in range(1, number)}
                assert rundir.read_generation(tmp_path).node == NODE
                assert await train(lead) == number
                assert rundir.read_generation(tmp_path).node == NODE

    run(steps())


@pytest.mark.parametrize("resume", [True, False])
def test_the_same_rank_after_a_drain(tmp_path: Path, resume: bool) -> None:
    """Its run ended in order, so that this is a new start."""

    async def steps() -> None:
        async with rank_0(tmp_path, resume=resume, ended=True) as lead:
            assert await train(lead) == 1
        assert rundir.read_generation(tmp_path).node == ""
        async with rank_0(tmp_path, resume=resume):
            assert files(tmp_path) == {checkpoint(1) if resume else f"earlier-000001/{checkpoint(1)}"}

    run(steps())


def test_numbers_never_go_back(tmp_path: Path) -> None:
    starts = [
        (True, NODE, False),
        (False, NODE, False),
        (False, OTHER, True),
        (True, NODE, True),
    ]

    async def steps() -> None:
        used = []
        for resume, node, ended in starts:
            async with rank_0(tmp_path, resume, node, ended) as lead:
                used.append(await train(lead))
            assert rundir.read_generation(tmp_path).number == used[-1]
        assert used == [1, 2, 3, 4]

    run(steps())


def test_a_new_run_does_not_wait_for_the_earlier_ones_ranks(tmp_path: Path) -> None:
    earlier = Persisted(3, "rl", (("agent", 0), *(("observer", ordinal) for ordinal in range(5))), OTHER)

    async def steps() -> None:
        rundir.write_generation(tmp_path, earlier)
        async with rank_0(tmp_path, resume=False) as lead:
            assert rundir.read_generation(tmp_path) == Persisted(3, "rl", (), NODE)
            assert await train(lead) == 4  # with one observer, which is its count now

    run(steps())


@pytest.mark.parametrize("resume", [True, False])
def test_another_jobs_directory_is_refused(tmp_path: Path, resume: bool) -> None:
    make(tmp_path, checkpoint(7), DONE)
    rundir.write_generation(tmp_path, Persisted(7, "chess", (), OTHER))
    before = contents(tmp_path)

    async def steps() -> None:
        with pytest.raises(UsageError, match="holds a run of chess, not of rl"):
            async with rank_0(tmp_path, resume):
                pass

    run(steps())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [COORDINATOR_LOCK, WRITER_LOCK])
def test_a_directory_in_use_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, checkpoint(7), DONE)
    before = contents(tmp_path)
    held = rundir.lock(tmp_path, name, 0)

    async def steps() -> None:
        with pytest.raises(UsageError, match="in use by another running job"):
            async with rank_0(tmp_path, resume=False):
                pass

    run(steps())
    assert files(tmp_path) == set(before) - {GENERATION}
    held.release()


def test_a_number_that_cannot_be_written_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        async with rank_0(tmp_path, resume=True) as lead:
            with monkeypatch.context() as patched:
                tries, again = list[str](), threading.Event()

                def broken(*_: object) -> None:
                    tries.append(lead.gang.state)
                    if len(tries) == 3:
                        again.set()
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

                patched.setattr(rundir, "write_generation", broken)
                training = asyncio.create_task(train(lead))
                assert await asyncio.to_thread(again.wait, 30)
                assert {*tries, lead.gang.state} == {"gathering"}
            assert await training == 1
            assert rundir.read_generation(tmp_path).number == 1

    run(steps())


# ---- a disk that hangs


class Hanging:
    """A function of rundir that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.goes_on, function = threading.Event(), threading.Event(), getattr(rundir, name)

        def hangs(*arguments: Any) -> Any:
            self.reached.set()
            assert self.goes_on.wait(30)
            return function(*arguments)

        monkeypatch.setattr(rundir, name, hangs)


def test_heartbeats_are_answered_while_the_disk_takes_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps() -> None:
        async with rank_0(tmp_path, resume=True) as lead:
            disk = Hanging(monkeypatch, "write_generation")
            training = asyncio.create_task(train(lead))
            assert await asyncio.to_thread(disk.reached.wait, 30)
            before = {key: member.received_at for key, member in lead.gang.members.items()}
            while any(lead.gang.members[key].received_at == at for key, at in before.items()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert lead.gang.state == "gathering"
            disk.goes_on.set()
            assert await training == 1

    run(steps())


def test_a_disk_that_hangs_while_a_run_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Hanging(monkeypatch, "read_generation")
    monkeypatch.setattr(run_files, "CLOSE_SECONDS", 0.01)

    async def steps() -> None:
        with pytest.raises(UsageError, match=r"the disk does not answer for REJOIN_TIMEOUT=1 s"):
            async with rank_0(tmp_path, resume=True, rejoin_timeout=1):
                pass

    run(steps())
    disk.goes_on.set()


def test_the_lock_is_kept_while_a_write_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another coordinator that came in before the write would have its own number replaced by an earlier one."""
    monkeypatch.setattr(run_files, "CLOSE_SECONDS", 0.01)

    async def steps() -> Hanging:
        async with rank_0(tmp_path, resume=True, ended=True) as lead:
            disk = Hanging(monkeypatch, "write_generation")
            training = asyncio.create_task(train(lead))
            assert await asyncio.to_thread(disk.reached.wait, 30)
            training.cancel()
        with pytest.raises(rundir.TakenError):
            rundir.lock(tmp_path, COORDINATOR_LOCK, 0)
        return disk

    disk = asyncio.run(asyncio.wait_for(steps(), 30))
    disk.goes_on.set()


# ---- a lock file that is deleted, and a result that cannot be saved


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_lock_file_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    monkeypatch.setattr(run_files, "LOCK_CHECK_SECONDS", 0.01)

    async def steps() -> None:
        async with rank_0(tmp_path, resume=True) as lead:
            watching = asyncio.create_task(lead.files.watch_lock())
            done, _ = await asyncio.wait({watching}, timeout=0.1)
            assert not done
            (tmp_path / COORDINATOR_LOCK).unlink()
            if replaced:
                rundir.lock(tmp_path, COORDINATOR_LOCK, 0).release()
            with pytest.raises(UsageError, match=r"CHECKPOINT_DIR=.*replaced" if replaced else r"CHECKPOINT_DIR=.*del"):
                await watching

    run(steps())


@pytest.mark.parametrize("effect", [Effect("begin", generation=2), Effect("done", summary={"score": 1.0})])
def test_a_run_whose_lock_file_is_gone_writes_nothing_over_that_of_a_second_run(tmp_path: Path, effect: Effect) -> None:
    async def steps() -> None:
        async with rank_0(tmp_path, resume=True) as lead:
            (tmp_path / COORDINATOR_LOCK).unlink()
            rundir.lock(tmp_path, COORDINATOR_LOCK, 0).release()
            rundir.write_generation(tmp_path, Persisted(7, "ps"))
            with pytest.raises(UsageError, match="replaced"):
                await lead.files.persist(effect)

    run(steps())
    assert rundir.read_generation(tmp_path).number == 7
    assert rundir.read_done(tmp_path) is None


class FullDisk:
    """Lets no file be written, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, write = 0, rundir.write_atomically

        def full(*arguments: Any) -> None:
            if self.times > 0:
                self.times -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write(*arguments)

        monkeypatch.setattr(rundir, "write_atomically", full)


@pytest.mark.parametrize(("failures", "saved", "code"), [(0, True, 0), (5, True, 0), (10**6, True, 4), (0, False, 4)])
def test_a_result_that_cannot_be_saved_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, saved: bool, code: int
) -> None:
    monkeypatch.setattr(run_files, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "SAVE_RETRY_SECONDS", 60.0 if failures < 100 else 0.3)
    disk = FullDisk(monkeypatch)

    async def steps() -> int:
        async with rank_0(tmp_path, resume=True) as lead:
            await train(lead)
            lead.files.record([Record("start", 0, 0.0, 1), Record("train", 0, 1.0, 0)])
            lead.gang.state, lead.gang.summary = "finished", {"saved": saved}
            disk.times = failures
            await lead.files.persist(Effect("done", summary=lead.gang.summary))
            return await lead.files.report(lead.gang, 0)

    with capture_logs() as logs:
        assert asyncio.run(asyncio.wait_for(steps(), 90)) == code
    lost = [line["event"] for line in logs if line["log_level"] == "error" and "lost" in line["event"]]
    if code == 0:
        assert not lost
        assert (tmp_path / rundir.SUMMARY).exists()
        assert rundir.read_done(tmp_path) == {"saved": True}
    else:
        assert any((rundir.SUMMARY if failures else "last checkpoint") in line for line in lost)


async def end(lead: Coordinator) -> int:
    """The job finishes; returns rank 0's exit code."""
    await train(lead)
    lead.files.record([Record("start", 0, 0.0, 1), Record("train", 0, 1.0, 0)])
    lead.gang.state, lead.gang.summary = "finished", {}
    await lead.files.persist(Effect("done", summary={}))
    return await lead.files.report(lead.gang, 0)


def test_what_is_on_disk_is_not_called_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "SAVE_RETRY_SECONDS", 0.3)
    write = rundir.write_atomically

    def full_but_for_done(path: Path, *parts: bytes) -> None:
        if path.name == rundir.SUMMARY:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *parts)

    monkeypatch.setattr(rundir, "write_atomically", full_but_for_done)

    async def steps() -> int:
        async with rank_0(tmp_path, resume=True) as lead:
            return await end(lead)

    with capture_logs() as logs:
        assert asyncio.run(asyncio.wait_for(steps(), 90)) == UNSAVED
    (lost,) = (line["event"] for line in logs if line["log_level"] == "error" and "lost" in line["event"])
    assert rundir.SUMMARY in lost
    assert rundir.HISTORY not in lost
    assert DONE not in lost


def test_started_again_it_reports_what_an_earlier_runs_report_hid(tmp_path: Path) -> None:
    """DONE is there, and of the report only that of an earlier run, which was stopped."""

    async def steps() -> int:
        async with rank_0(tmp_path, resume=True) as lead:
            await end(lead)
        (tmp_path / rundir.SUMMARY).write_text(json.dumps({"state": "stopped"}))
        (tmp_path / rundir.PAGE).touch()
        async with rank_0(tmp_path, resume=True) as lead:
            return await lead.files.report(lead.gang, 0)

    assert asyncio.run(asyncio.wait_for(steps(), 90)) == 0
    assert json.loads((tmp_path / rundir.SUMMARY).read_text())["state"] == "finished"
