"""RESUME: an earlier run's files are moved aside whole or not at all, and numbers of generations never go back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
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
from rolecall.gang.protocol import Answer, Beat, Directive, Effect, Heartbeat
from rolecall.jobs.rl import RlSettings
from rolecall.messages.codec import decode, encode
from rolecall.rank import run_files
from rolecall.rank.coordinator import Coordinator
from rolecall.record import rundir
from rolecall.record.history import Start
from rolecall.record.rundir import COORDINATOR_LOCK, DONE, GENERATION, WRITER_LOCK, Persisted, set_aside
from rolecall.tunnel.rank0 import HEARTBEAT_PATH
from tests.loops import in_a_loop
from tests.ports import free_ports

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
        lead.checked()
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
                beat = encode(Beat(incarnation, sequence, heartbeat=heartbeat))
                async with session.post(HEARTBEAT_PATH, data=beat) as response:
                    answer = decode(Answer, await response.read())
                    assert answer.directive is not None
                    directives[role] = answer.directive
    number = directives["agent"].generation
    assert rundir.read_generation(lead.settings.checkpoint_dir).number == number
    make(lead.settings.checkpoint_dir, checkpoint(number))
    return number


def checkpoint(number: int) -> str:
    return f"checkpoint-{number:06d}-{number * 10:010d}.pt"


def files(directory: Path) -> set[str]:
    return set(contents(directory)) - {GENERATION}


async def finished_run(directory: Path) -> None:
    async with rank_0(directory, resume=True, ended=True) as lead:
        assert await train(lead) == 1
        rundir.write_done(directory, {"solved": True})


@pytest.mark.parametrize("node", [NODE, OTHER])
@in_a_loop
async def test_a_finished_job_starts_anew(tmp_path: Path, node: str) -> None:
    await finished_run(tmp_path)
    async with rank_0(tmp_path, resume=False, node=node) as lead:
        assert lead.gang.state == "gathering"
        assert lead.gang.summary == {}
        assert files(tmp_path) == {f"earlier-000001/{checkpoint(1)}", f"earlier-000001/{DONE}"}
        assert json.loads((tmp_path / "earlier-000001" / DONE).read_text()) == {"solved": True}
        assert await train(lead) == 2


@pytest.mark.parametrize("resume", [True, False])
@in_a_loop
async def test_a_rank_that_was_killed_goes_on(tmp_path: Path, resume: bool) -> None:
    """Its engine starts it again with the same RESUME=0, again and again; that is the same run."""

    for number in (1, 2, 3):
        async with rank_0(tmp_path, resume=resume) as lead:
            assert files(tmp_path) == {checkpoint(earlier) for earlier in range(1, number)}
            assert rundir.read_generation(tmp_path).node == NODE
            assert await train(lead) == number
            assert rundir.read_generation(tmp_path).node == NODE


@pytest.mark.parametrize("resume", [True, False])
@in_a_loop
async def test_the_same_rank_after_a_drain(tmp_path: Path, resume: bool) -> None:
    """Its run ended in order, so that this is a new start."""

    async with rank_0(tmp_path, resume=resume, ended=True) as lead:
        assert await train(lead) == 1
    assert rundir.read_generation(tmp_path).node == ""
    async with rank_0(tmp_path, resume=resume):
        assert files(tmp_path) == {checkpoint(1) if resume else f"earlier-000001/{checkpoint(1)}"}


@in_a_loop
async def test_a_new_run_does_not_wait_for_the_earlier_ones_ranks(tmp_path: Path) -> None:
    earlier = Persisted(3, "rl", (("agent", 0), *(("observer", ordinal) for ordinal in range(5))), OTHER)

    rundir.write_generation(tmp_path, earlier)
    async with rank_0(tmp_path, resume=False) as lead:
        assert rundir.read_generation(tmp_path) == Persisted(3, "rl", (), NODE)
        assert await train(lead) == 4  # with one observer, which is its count now


@pytest.mark.parametrize("resume", [True, False])
@in_a_loop
async def test_another_jobs_directory_is_refused(tmp_path: Path, resume: bool) -> None:
    make(tmp_path, checkpoint(7), DONE)
    rundir.write_generation(tmp_path, Persisted(7, "chess", (), OTHER))
    before = contents(tmp_path)

    with pytest.raises(UsageError, match="holds a run of chess, not of rl"):
        async with rank_0(tmp_path, resume):
            pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [COORDINATOR_LOCK, WRITER_LOCK])
@in_a_loop
async def test_a_directory_in_use_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, checkpoint(7), DONE)
    before = contents(tmp_path)
    held = rundir.lock(tmp_path, name, 0)

    with pytest.raises(UsageError, match="in use by another running job"):
        async with rank_0(tmp_path, resume=False):
            pass
    assert files(tmp_path) == set(before) - {GENERATION}
    held.release()


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


@in_a_loop
async def test_heartbeats_are_answered_while_the_disk_takes_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@in_a_loop
async def test_a_disk_that_hangs_while_a_run_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Hanging(monkeypatch, "read_generation")
    monkeypatch.setattr(run_files, "CLOSE_SECONDS", 0.01)

    with pytest.raises(UsageError, match=r"the disk does not answer for REJOIN_TIMEOUT=1 s"):
        async with rank_0(tmp_path, resume=True, rejoin_timeout=1):
            pass
    disk.goes_on.set()


@in_a_loop
async def test_the_lock_is_kept_while_a_write_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another coordinator that came in before the write would have its own number replaced by an earlier one."""
    monkeypatch.setattr(run_files, "CLOSE_SECONDS", 0.01)
    async with rank_0(tmp_path, resume=True, ended=True) as lead:
        disk = Hanging(monkeypatch, "write_generation")
        training = asyncio.create_task(train(lead))
        assert await asyncio.to_thread(disk.reached.wait, 30)
        training.cancel()
    with pytest.raises(rundir.TakenError):
        rundir.lock(tmp_path, COORDINATOR_LOCK, 0)
    disk.goes_on.set()


# ---- a lock file that is deleted, and a result that cannot be saved


@pytest.mark.parametrize("replaced", [False, True])
@in_a_loop
async def test_a_run_whose_lock_file_is_gone_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(run_files, "LOCK_CHECK_SECONDS", 0.01)

    async with rank_0(tmp_path, resume=True) as lead:
        watching = asyncio.create_task(lead.files.watch_lock())
        done, _ = await asyncio.wait({watching}, timeout=0.1)
        assert not done
        if replaced:
            (tmp_path / "another").touch()
            (tmp_path / "another").rename(tmp_path / COORDINATOR_LOCK)
        else:
            (tmp_path / COORDINATOR_LOCK).unlink()
        with pytest.raises(UsageError, match=r"CHECKPOINT_DIR=.*replaced" if replaced else r"CHECKPOINT_DIR=.*del"):
            await watching


@pytest.mark.parametrize("effect", [Effect("begin", generation=2), Effect("done", summary={"score": 1.0})])
@in_a_loop
async def test_a_run_whose_lock_file_is_gone_writes_nothing_over_that_of_a_second_run(
    tmp_path: Path, effect: Effect
) -> None:
    async with rank_0(tmp_path, resume=True) as lead:
        (tmp_path / COORDINATOR_LOCK).unlink()
        rundir.lock(tmp_path, COORDINATOR_LOCK, 0).release()
        rundir.write_generation(tmp_path, Persisted(7, "ps", ()))
        with pytest.raises(UsageError, match="replaced"):
            await lead.files.persist(effect)
    assert rundir.read_generation(tmp_path).number == 7
    assert rundir.read_done(tmp_path) is None


class FullDisk:
    """Lets no file be written but for those named `kept`, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
        self.times, write = 0, rundir.write_atomically

        def full(path: Path, *parts: bytes) -> None:
            if self.times > 0 and path.name != kept:
                self.times -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, *parts)

        monkeypatch.setattr(rundir, "write_atomically", full)


async def end(lead: Coordinator, disk: FullDisk | None = None, failures: int = 0, saved: bool = True) -> int:
    """The job finishes; returns rank 0's exit code."""
    await train(lead)
    lead.files.journal.record([Start(1, 0)])
    lead.gang.state, lead.gang.summary = "finished", {} if saved else {rundir.CHECKPOINT_LOST: True}
    if disk:
        disk.times = failures
    await lead.files.persist(Effect("done", summary=lead.gang.summary))
    return await lead.files.report(lead.gang, 0)


@pytest.mark.parametrize(
    ("failures", "kept", "saved", "lost"),
    [
        (0, "", True, ()),
        (5, "", True, ()),
        (10**6, "", True, (rundir.SUMMARY, DONE)),
        (10**6, DONE, True, (rundir.SUMMARY,)),
        (0, "", False, ("last checkpoint",)),
    ],
)
@in_a_loop
async def test_a_result_that_cannot_be_saved_is_no_success_and_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, kept: str, saved: bool, lost: tuple[str, ...]
) -> None:
    monkeypatch.setattr(run_files, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "SAVE_RETRY_SECONDS", 60.0 if failures < 100 else 0.3)
    disk = FullDisk(monkeypatch, kept)
    with capture_logs() as logs:
        async with rank_0(tmp_path, resume=True) as lead:
            assert await end(lead, disk, failures, saved) == (UNSAVED if lost else 0)
    said = [line["event"] for line in logs if line["log_level"] == "error" and "lost" in line["event"]]
    assert len(said) == bool(lost)
    for name in (rundir.SUMMARY, rundir.HISTORY, DONE, "last checkpoint"):
        assert (name in "".join(said)) == (name in lost), said
    if not lost:
        assert (tmp_path / rundir.SUMMARY).exists()
        assert rundir.read_done(tmp_path) == {}


@in_a_loop
async def test_started_again_it_reports_what_an_earlier_runs_report_hid(tmp_path: Path) -> None:
    """DONE is there, and of the report only that of an earlier run, which was stopped."""
    async with rank_0(tmp_path, resume=True) as lead:
        await end(lead)
    (tmp_path / rundir.SUMMARY).write_text(json.dumps({"state": "stopped"}))
    (tmp_path / rundir.PAGE).touch()
    async with rank_0(tmp_path, resume=True) as lead:
        assert await lead.files.report(lead.gang, 0) == 0
    assert json.loads((tmp_path / rundir.SUMMARY).read_text())["state"] == "finished"


@in_a_loop
async def test_rows_that_come_while_a_stopped_run_is_reported_cost_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rank_0(tmp_path, resume=True) as lead:
        await train(lead)
        lead.files.journal.record([Start(1, 0)])
        write = lead.files.journal._write

        def busy() -> None:
            write()
            lead.files.journal.happened("lost", 1, "left", "observer_0 left")

        monkeypatch.setattr(lead.files.journal, "_write", busy)
        monkeypatch.setattr(run_files.render, "write", lambda directory, state: (directory / rundir.PAGE).touch())
        assert await lead.files.report(lead.gang, 0, lambda summary: summary) == 0
        assert (tmp_path / rundir.PAGE).exists()
