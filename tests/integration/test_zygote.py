"""The zygote of `rolecall run`: its forks, and what happens where it dies."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rolecall.rank import zygote
from rolecall.rank.zygote import Forked, Zygote, ZygoteError
from tests.integration.cluster import DEADLINE, QUICK, ROOT, TOKEN, until


def fork(zygote: Zygote, output: Path, *arguments: str, **environment: str) -> Forked:
    with output.open("w") as file:
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return zygote.fork(arguments, {**base, **environment}, file.fileno(), file.fileno())


def test_a_fork_has_its_own_arguments_environment_and_output(server: Zygote, tmp_path: Path) -> None:
    one = fork(server, tmp_path / "one", "rank", JOB="rl", ROLE="nobody")
    other = fork(server, tmp_path / "other", "config", "rl", "--markdown")
    assert one.pid != other.pid
    assert (one.wait_for(DEADLINE), other.wait_for(DEADLINE)) == (2, 0)
    assert (one.returncode, other.returncode) == (2, 0)
    lines = (tmp_path / "one").read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("rolecall: ROLE='nobody': no such role")
    assert "| ENV_ID |" in (tmp_path / "other").read_text()


def test_one_that_has_ended_before_its_number_is_read(server: Zygote, tmp_path: Path) -> None:
    for number in range(3):
        forked = fork(server, tmp_path / f"{number}", "--no-such-option")
        until(lambda pid=forked.pid: not psutil.pid_exists(pid), "it to be reaped")
        assert forked.wait_for(DEADLINE) == 2
    status, theirs = os.pipe()
    zygote._tell(theirs, 2**22)
    zygote._tell(theirs, -signal.SIGKILL)
    os.close(theirs)
    assert (zygote._read(status), zygote._read(status), zygote._read(status)) == (2**22, -signal.SIGKILL, None)
    os.close(status)


def test_a_signal_is_a_negative_code_and_takes_the_group_along(server: Zygote, tmp_path: Path) -> None:
    rank = fork(server, tmp_path / "out", "rank", JOB="rl", ROLE="observer", MASTER_ADDR="127.0.0.1",
                PORT=str(free_port()), METRICS_PORT=str(free_port()), JOB_TOKEN=TOKEN,
                TMPDIR=str(tmp_path))  # fmt: skip
    family = until(lambda: psutil.Process(rank.pid).children(recursive=True), "its fork server")
    rank.kill()
    assert rank.wait_for(DEADLINE) == -signal.SIGKILL
    until(lambda: not any(child.is_running() for child in family), "its fork server to be gone")


def test_without_the_zygote_no_fork_and_no_rank_is_left(tmp_path: Path) -> None:
    with Zygote("rl") as running:
        rank = fork(running, tmp_path / "out", "rank", JOB="rl", ROLE="observer", MASTER_ADDR="127.0.0.1",
                    PORT=str(free_port()), METRICS_PORT=str(free_port()), JOB_TOKEN=TOKEN,
                TMPDIR=str(tmp_path))  # fmt: skip
        running._process.kill()
        assert rank.wait_for(DEADLINE) == -signal.SIGKILL
        assert not psutil.pid_exists(rank.pid) or psutil.Process(rank.pid).status() == psutil.STATUS_ZOMBIE
        with pytest.raises(ZygoteError, match="it has ended"):
            fork(running, tmp_path / "again", "jobs")
        assert running.call(["jobs"], DEADLINE) == 0  # alone


def test_one_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "DEADLINE", 0.2)
    with Zygote("rl") as running:
        running._process.send_signal(signal.SIGSTOP)
        with pytest.raises(ZygoteError, match=r"did not answer for 0\.2 s"):
            fork(running, tmp_path / "out", "jobs")
        monkeypatch.setattr(zygote, "DEADLINE", DEADLINE)
        running._process.send_signal(signal.SIGCONT)
        assert fork(running, tmp_path / "later", "jobs").wait_for(DEADLINE) == 0
        assert not (tmp_path / "out").read_text()  # what was given up is not done later
        assert "observer" in (tmp_path / "later").read_text()


def test_a_command_that_outlasts_its_deadline_is_ended(
    server: Zygote, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    before = set(psutil.Process(server._process.pid).children())
    with pytest.raises(TimeoutError):
        server.call(["describe", str(tmp_path / "slow.py")], 1.0)
    until(lambda: set(psutil.Process(server._process.pid).children()) <= before, "it to be gone")
    assert server.call(["jobs"], DEADLINE) == 0
    assert "observer" in capfd.readouterr().out


def test_ctrl_c_while_it_imports_is_prompt_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "run", "rl", "--plain"], env={**os.environ, "CHECKPOINT_DIR": str(tmp_path)},
        cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        # once it is another program: until then its parent waits for it
        (forking,) = until(lambda: [child for child in psutil.Process(process.pid).children()
                                    if "zygote" in " ".join(child.cmdline())], "the zygote")  # fmt: skip
        forking.suspend()  # it imports for ever
        until(lambda: (tmp_path / "logs").exists(), "the ranks to be planned")
        until(lambda: psutil.Process(process.pid).num_threads() > 1, "the ranks to be asked for")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130, out
        assert not forking.is_running()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_help_of_a_users_job_is_all_that_is_printed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "pi.py", tmp_path)
    command = [sys.executable, "-m", "rolecall", "run", str(tmp_path / "pi.py"), "--help"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "--samplers" in run.stdout


def test_what_a_users_file_says_as_it_exits_is_shown(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text('import sys\nsys.exit("the water is cold")\n')
    command = [sys.executable, "-m", "rolecall", "run", str(tmp_path / "ends.py")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert run.returncode == 2, run.stderr
    assert "the water is cold" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_run_outlives_its_zygote(tmp_path: Path) -> None:
    """Its ranks end with it, and are restarted by themselves."""
    environment = {**os.environ, **QUICK, "OBSERVERS": "1", "CHECKPOINT_DIR": str(tmp_path), "LOG_INTERVAL": "1",
                   "MAX_ITERATIONS": "12", "SOLVED_RETURN": "1000", "CHECKPOINT_INTERVAL": "0.2"}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "run", "rl", "--plain"], env=environment, cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    try:
        until(lambda: any("checkpoint" in line for line in lines), "a checkpoint")
        (forking,) = psutil.Process(process.pid).children()
        pidfds = [os.pidfd_open(rank.pid) for rank in forking.children() if os.getpgid(rank.pid) == rank.pid]
        assert len(pidfds) == 2
        forking.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], DEADLINE)[0], "a rank stays behind"
            os.close(pidfd)
        assert process.wait(DEADLINE) == 0, "".join(lines)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()
    assert sum("crashed (SIGKILL), restarting it" in line for line in lines) == 2
    assert any("resumed" in line for line in lines), "".join(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
