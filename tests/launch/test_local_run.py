"""`rolecall run`: its end where processes are frozen, its number of ranks, and the folders that it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.config import Settings
from rolecall.declare import describe, sources
from rolecall.errors import FAILED, UNSAVED, UsageError
from rolecall.launch import here, local
from rolecall.launch.local import LocalRun
from rolecall.launch.rank_process import INTERRUPTED, RankProcess
from rolecall.record import rundir

DEADLINE = 120  # seconds; a fail-safe
# ends at SIGTERM, also at one between the line of its output and its wait
ENDS = """
import os, signal, sys
awakened, waker = os.pipe()
os.set_blocking(waker, False)
signal.set_wakeup_fd(waker)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
os.read(awakened, 1)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocalRun:
    """A run of `rl` with two observers, whose ranks end with SIGTERM."""
    monkeypatch.setattr(here, "command", lambda: [sys.executable, "-S", "-c", ENDS])
    monkeypatch.setattr(local, "EXIT_SECONDS", 0.2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return LocalRun(describe.describe("rl"), Settings(checkpoint_dir=tmp_path / "run"), live=False)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for `condition`."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def up(run: LocalRun, count: int) -> None:
    """Waits until `count` ranks have begun."""
    await until(lambda: sum(rank.log.exists() and "up" in rank.log.read_text() for rank in run.ranks) >= count)


def test_a_frozen_supervisor_delays_no_end(run: LocalRun) -> None:
    async def play() -> int:
        over = asyncio.create_task(run.run())
        await up(run, 3)
        for rank in run.ranks[:2]:  # rank 0 is one of them
            os.kill(rank.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)
        return await asyncio.wait_for(over, DEADLINE)

    assert asyncio.run(play()) == INTERRUPTED


def test_a_rank_that_comes_too_late_delays_no_end(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "EXIT_SECONDS", 2 * DEADLINE)

    async def play() -> int:
        over = asyncio.create_task(run.run())
        await up(run, 3)
        os.kill(run.ranks[0].pid, signal.SIGTERM)  # the job has finished; the others know nothing of it
        return await asyncio.wait_for(over, DEADLINE)

    assert asyncio.run(play()) == 0


def test_ranks_are_added_and_dropped(run: LocalRun) -> None:
    async def play() -> int:
        with pytest.raises(UsageError, match=r"^agent_0: .*it is starting"):
            await run.kill("agent", 0, "")
        over = asyncio.create_task(run.run())
        await up(run, 3)
        await run.scale("observer", 4)
        await up(run, 5)
        assert [rank.name for rank in run.ranks][1:] == [f"observer_{number}" for number in range(4)]
        ports = [rank.environment[name] for rank in run.ranks for name in ("PORT", "METRICS_PORT")]
        assert len({*ports}) == len(ports)
        dropped = [weakref.ref(rank) for rank in run.ranks[2:]]
        await run.scale("observer", 1)
        await until(lambda: len(run.ranks) == 2)
        await until(lambda: gc.collect() >= 0 and not any(rank() for rank in dropped))  # nothing holds them
        assert [rank.name for rank in run.ranks] == ["agent_0", "observer_0"]
        assert not over.done()
        for role, count in (("agent", 2), ("nobody", 1), ("observer", 0), ("observer", 10**6)):
            with pytest.raises(UsageError, match=f"^{role}"):
                await run.scale(role, count)
        os.kill(os.getpid(), signal.SIGINT)
        return await asyncio.wait_for(over, DEADLINE)

    assert asyncio.run(play()) == INTERRUPTED


def test_the_next_run_removes_the_folder_of_a_killed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, lock = here.temporary_folder()
    (folder / "token").touch()
    here.remove_leftovers()
    assert (folder / "token").exists()  # its run lives
    os.close(lock)
    here.remove_leftovers()
    assert not folder.exists()


def test_the_next_run_removes_the_source_that_a_killed_one_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, signal\nfrom rolecall.declare import sources\n"
        "with sources.passed_on({'pi.py': b''}): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=DEADLINE)
    (left,) = tmp_path.iterdir()
    with sources.passed_on({"pi.py": b""}):
        here.remove_leftovers()
        (kept,) = tmp_path.iterdir()  # its run lives
        assert kept != left
    assert not [*tmp_path.iterdir()]


def test_a_refused_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(here, "command", lambda: [sys.executable, "-S", "-c", "raise SystemExit(2)"])
    job = describe.describe("rl")
    assert asyncio.run(LocalRun(job, Settings(), live=False).run()) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(here, "PORTS", [taken.getsockname()[1]])
        with pytest.raises(UsageError, match="free ports"):
            LocalRun(job, Settings(), live=False)
    assert not (tmp_path / "runs").exists()


def test_a_temporary_folder_too_deep_for_a_socket_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UsageError, match=r"^TMPDIR="):
        asyncio.run(LocalRun(describe.describe("rl"), Settings(), live=False).run())
    assert not [*deep.iterdir()]
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rolecall", "jobs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m rolecall run no-such-job >&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    code = "import os, sys; from rolecall import __main__; __main__.main(['jobs']); sys.exit(sys.stdout.fileno() != 1)"
    subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{code}" >&-'], check=True, timeout=DEADLINE)


def last_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], directory: Path, code: int, *written: str
) -> str:
    """What is printed at the end of a run whose rank 0 has `written` files of its report and ends with `code`."""

    async def supervise(rank: RankProcess) -> int:
        if not rank.name.startswith("agent"):
            return 0
        for name in written:
            rundir.write_atomically(directory / name, b"of this run")
        return code

    monkeypatch.setattr(RankProcess, "supervise", supervise)
    run = LocalRun(describe.describe("rl", ["--observers", "1"]), Settings(job="rl", checkpoint_dir=directory), False)
    assert asyncio.run(asyncio.wait_for(run.run(), 60)) == code
    return capfd.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("code", [0, FAILED, UNSAVED])
def test_an_earlier_runs_files_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, code: int
) -> None:
    for name in (rundir.SUMMARY, rundir.PAGE):
        (tmp_path / name).write_text("of an earlier run")
    line = last_line(monkeypatch, capfd, tmp_path, code, rundir.PAGE)
    assert rundir.PAGE in line
    assert rundir.SUMMARY not in line
    assert (str(code) in line.split(";")[0]) == (code != 0)


def test_a_finished_run_lists_its_files_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rundir.write_done(tmp_path, {})
    (tmp_path / rundir.SUMMARY).write_text("of this run")
    assert rundir.SUMMARY in last_line(monkeypatch, capfd, tmp_path, 0)


def test_many_ranks_on_few_cores_have_longer_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEASE_SECONDS", "CONNECT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert here.start_bounds(ranks=16, cores=2) == {}
    assert here.start_bounds(ranks=64, cores=2) == {"LEASE_SECONDS": "24", "CONNECT_TIMEOUT": "120"}
    monkeypatch.setenv("LEASE_SECONDS", "9")
    assert here.start_bounds(ranks=64, cores=2) == {"LEASE_SECONDS": "9", "CONNECT_TIMEOUT": "120"}
