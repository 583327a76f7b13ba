"""The zygote of `rolecall run`: its forks, and a run whose zygote dies or is suspended."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rolecall.launch.here import LocalProcess
from rolecall.rank.zygote import Forked, Zygote
from tests.integration.cluster import DEADLINE, ENDLESS, QUICK, ROOT, TOKEN, until
from tests.ports import free_ports


def fork(zygote: Zygote, output: Path, *arguments: str, **environment: str) -> Forked:
    with output.open("w") as file:
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return zygote.fork(arguments, {**base, **environment}, file.fileno(), file.fileno())


@contextmanager
def running(directory: Path, job: str = "rl", **settings: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`rolecall run JOB`, and the lines that it has printed."""
    counts = {"OBSERVERS": "1", "THROWERS": "1", "CHECKPOINT_INTERVAL": "0.2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "run", job, "--plain"],
        env={**os.environ, **QUICK, **counts, "CHECKPOINT_DIR": str(directory), **settings},
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()


def zygote_of(run: int) -> psutil.Process:
    (found,) = until(
        lambda: [
            child
            for child in psutil.Process(run).children()
            if not ended(child) and "zygote" in " ".join(child.cmdline())
        ],
        "the zygote",
    )
    return found


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_fork_has_its_own_arguments_environment_and_output(server: Zygote, tmp_path: Path) -> None:
    descriptors = psutil.Process().num_fds()
    one = fork(server, tmp_path / "one", "rank", JOB="rl", ROLE="nobody")
    other = fork(server, tmp_path / "other", "config", "rl", "--markdown")
    assert one.pid != other.pid
    assert (one.wait_for(DEADLINE), other.wait_for(DEADLINE)) == (2, 0)
    assert (one.returncode, other.returncode) == (2, 0)
    assert psutil.Process().num_fds() <= descriptors  # those of earlier tests may have been closed meanwhile
    lines = (tmp_path / "one").read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("rolecall: ROLE='nobody': no such role")
    assert "| ENV_ID |" in (tmp_path / "other").read_text()


def test_kill_reports_the_signal_and_ends_the_process_group(server: Zygote, tmp_path: Path) -> None:
    port, metrics = free_ports(2)
    rank = fork(
        server,
        tmp_path / "out",
        "rank",
        JOB="rl",
        ROLE="observer",
        MASTER_ADDR="127.0.0.1",
        PORT=str(port),
        METRICS_PORT=str(metrics),
        JOB_TOKEN=TOKEN,
        TMPDIR=str(tmp_path),
    )
    family = until(lambda: psutil.Process(rank.pid).children(recursive=True), "its fork server")
    assert {*tmp_path.iterdir()} > {tmp_path / "out"}
    rank.kill()
    assert asyncio.run(LocalProcess(rank, tmp_path).wait()) == -signal.SIGKILL
    until(lambda: not any(child.is_running() for child in family), "its fork server to be gone")
    assert {*tmp_path.iterdir()} == {tmp_path / "out"}


def test_call_ends_a_command_that_outlasts_its_deadline(
    server: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TimeoutError):
        server.call(["describe", str(tmp_path / "slow.py")], 3.0)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid), "it to be gone")


def test_ctrl_c_during_the_imports_ends_the_run_and_its_zygote(tmp_path: Path) -> None:
    with running(tmp_path) as (run, lines):
        zygote = zygote_of(run.pid)
        zygote.suspend()  # it imports for ever
        until(lambda: (tmp_path / "logs").exists(), "the ranks to be planned")
        until(lambda: psutil.Process(run.pid).num_threads() > 1, "the ranks to be asked for")
        run.send_signal(signal.SIGINT)
        assert run.wait(DEADLINE) == 130, lines
        assert ended(zygote)


def test_a_zygote_that_is_ended_while_a_fork_begins_has_no_successor() -> None:
    program = (
        "import os\n"
        "from rolecall.rank import fork_server\n"
        "from rolecall.rank.zygote import Zygote\n"
        "zygote, ensure_running = Zygote(), fork_server.ensure_running\n"
        "def wait():\n"
        "    os.waitid(os.P_PID, fork_server.server_pid(), os.WEXITED | os.WNOWAIT)\n"
        "def after_the_end(preload):\n"
        "    zygote.end()\n"
        "    wait()\n"
        "    ensure_running(preload)\n"
        "fork_server.ensure_running = after_the_end\n"
        "try:\n"
        "    zygote.fork(['--version'], {}, 1, 2)\n"
        "except fork_server.ForkError:\n"
        "    wait()\n"
        "else:\n"
        "    raise SystemExit('forked')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=DEADLINE).returncode == 0


def test_the_zygote_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "starter.py").write_text(
        "from rolecall.rank.zygote import Zygote\n"
        "if __name__ == '__main__':\n"
        "    with Zygote() as zygote:\n"
        "        raise SystemExit(zygote.call(['--version'], 60))\n"
    )
    program = [sys.executable, "-m", "starter"]
    assert subprocess.run(program, cwd=tmp_path, timeout=DEADLINE, check=False).returncode == 0
    assert not (tmp_path / "imported").exists()


def test_run_survives_the_death_of_its_zygote(tmp_path: Path) -> None:
    """Its ranks end with the zygote, and are restarted without it."""
    with running(tmp_path, "tests/integration/dartboard.py") as (run, lines):
        until(lambda: any("checkpoint" in line for line in lines), "a checkpoint")
        zygote = zygote_of(run.pid)
        pidfds = [os.pidfd_open(rank.pid) for rank in zygote.children() if os.getpgid(rank.pid) == rank.pid]
        assert len(pidfds) == 2
        zygote.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], DEADLINE)[0], "a rank stays behind"
            os.close(pidfd)
        until(lambda: any("resumed" in line for line in lines), "the restarted ranks")
        (tmp_path / "files" / "stop").write_text("")
        assert run.wait(DEADLINE) == 0, "".join(lines)
    assert sum("crashed (SIGKILL), restarting it" in line for line in lines) == 2


def test_killed_run_whose_ranks_print_megabytes_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    temporary = tempfile.mkdtemp(prefix="rolecall-")  # short: the path of a socket has at most 107 characters
    loud = {**ENDLESS["rl"], "ENV_ID": "tests.integration.environments:Loud-v0"}
    with running(tmp_path, TMPDIR=temporary, **loud) as (run, lines):
        log = tmp_path / "logs" / "observer_0.log"
        until(lambda: log.exists() and "x" * 3_000_000 in log.read_text(), "the megabytes")
        until(lambda: any("checkpoint" in line for line in lines), "a checkpoint")
        family = [
            child
            for child in psutil.Process(run.pid).children(recursive=True)
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        run.kill()
        until(lambda: all(map(ended, family)), "its processes to be gone")
    until(lambda: not [*Path(temporary).glob("pymp-*")], "the socket to be deleted")
    shutil.rmtree(temporary)


def test_a_rank_that_leads_no_process_group_yet_can_be_killed() -> None:
    async def killed() -> int:
        rank = LocalProcess(await asyncio.create_subprocess_exec("sleep", "600"))  # as a fork is at first
        rank.kill()
        return await asyncio.wait_for(rank.wait(), DEADLINE)

    assert asyncio.run(killed()) == -signal.SIGKILL


def test_suspended_zygote_delays_no_exit(server: Zygote, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    rank = fork(server, tmp_path / "out", "describe", str(tmp_path / "slow.py"))
    zygote_of(os.getpid()).suspend()
    os.kill(rank.pid, signal.SIGKILL)
    assert asyncio.run(asyncio.wait_for(rank.wait(), DEADLINE)) == -signal.SIGKILL


def test_a_zygote_that_is_a_fork_holds_nothing_that_is_withheld_from_it() -> None:
    program = (
        "import os, select\n"
        "from rolecall.rank.zygote import Zygote\n"
        "read, write = os.pipe()\n"
        "with Zygote(withheld=(read, write)):\n"
        "    os.close(write)\n"
        "    raise SystemExit(not select.select([read], [], [], 60)[0])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE).returncode == 0
