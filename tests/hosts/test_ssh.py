"""`rolecall run --hosts` with OpenSSH's client and server: hosts that are namespaces, a cut, a kill, and errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rolecall.checkpoint import checkpoint
from rolecall.errors import USAGE
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.observe import targets
from rolecall.record import rundir
from tests.chaos.jobs import counted
from tests.hosts import sshd
from tests.hosts.sshd import SshHosts
from tests.integration.cluster import ROOT

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
NAMES = ("a", "b", "c", "d")
DEADLINE = 120.0
END_SECONDS = 25.0  # for the ranks of a host that is cut off
JOB = str(Path(__file__).with_name("patient.py"))
SMALL = ("--hosts", "d,a,b,c", "--threads", "1")
BLOBS = ("--dataset", "tests.integration.learning:blobs", "--model", "tests.integration.learning:slow_noisy")
PS = ("ps", *SMALL, *BLOBS, "--batch-size", "6", "--epochs", "25")
UPDATES = 150
TEACHING = ("--taught", "10", "--updates", f"{UPDATES}", "--goal", "2", "--rewards", "1")
GRPO = (str(ROOT / "examples" / "grpo.py"), *SMALL, *TEACHING, "--width", "16", "--groups", "4")


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder, SshHosts(Path(folder), NAMES) as hosts:
        yield hosts


class Run:
    """A run that has begun; its folder is that of its logs."""

    def __init__(self, hosts: SshHosts, folder: Path, *words: str, kept: str = "kept") -> None:
        self.hosts, self.folder, self.kept = hosts, folder, kept
        self.environment = {**hosts.environment, "TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir(parents=True)
        self.command = [sys.executable, "-m", "rolecall"]
        self._output = (folder / "output").open("w")
        self.process = subprocess.Popen(
            [*self.command, "run", *words, "--plain", "--checkpoint-dir", kept],
            cwd=folder,
            env=self.environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def shown(self) -> str:
        return (self.folder / "output").read_text()

    def call(self, name: str, *words: str) -> str:
        command = [*self.command, name, self.kept, *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=DEADLINE
        )
        return done.stdout + done.stderr

    def step(self) -> float:
        """Rank 0's step, from its page's port on this machine."""
        with contextlib.suppress(OSError, IndexError):
            url = targets.ranks_of(self.folder / self.kept)[0].url
            with urllib.request.urlopen(url, timeout=5) as answer:
                if match := re.search(r"^rolecall_step(?:{[^}]*})? (\S+)$", answer.read().decode(), re.MULTILINE):
                    return float(match[1])
        return 0.0

    def places(self) -> dict[str, str]:
        """Where each rank runs."""
        rows = [line.split() for line in self.call("ps").splitlines()[1:]]
        return {row[0]: row[2].partition(":")[0] for row in rows}

    def until(self, condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.shown
            assert self.process.poll() is None, self.shown
            time.sleep(0.1)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
        self._output.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        yield Path(name)


@pytest.fixture
def start(hosts: SshHosts, folder: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*words: str) -> Run:
        runs.append(Run(hosts, folder, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def nothing_is_left(hosts: SshHosts, run: Run, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while left := [*(line for name in NAMES for line in (*hosts.processes(name), *hosts.left(name))), *clients(hosts)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def clients(hosts: SshHosts) -> list[psutil.Process]:
    """The processes of ssh here."""
    processes = [*psutil.process_iter(["name", "cmdline"])]
    return [each for each in processes if each.info["name"] == "ssh" and str(hosts.folder) in str(each.info["cmdline"])]


def test_a_run_on_four_hosts(hosts: SshHosts, start: Callable[..., Run]) -> None:
    run = start(JOB, "--workers", "5", "--hosts", "a,b,c,d")
    run.until(lambda: run.step() > 10)
    assert run.places() == {
        "lead_0": "a", "worker_0": "b", "worker_1": "c", "worker_2": "d", "worker_3": "a", "worker_4": "b"}  # fmt: skip
    assert "worker" in run.call("stacks", "worker_1")
    token = next((run.folder / "tmp").glob("rolecall-local-*/token")).read_text().strip()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            assert token not in " ".join(process.cmdline())
            assert token.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert not [file for name in NAMES for file in hosts.homes[name].rglob("*token*")]
    assert "starting worker_5" in run.call("scale", "worker=6")
    assert "worker_0: has no process 'decoder'; its parts are: supervisor, " in run.call(
        "kill", "worker_0", "--part", "decoder"
    )
    assert re.search(r"killed worker_0 on b: worker \d+\n", run.call("kill", "worker_0", "--part", "worker"))
    assert re.search(r"killed worker_1 on c: supervisor \d+, .*worker \d+", run.call("kill", "worker_1"))
    run.until(lambda: "worker_1 crashed (SIGKILL), restarting it" in run.shown)
    run.until(lambda: len(re.findall(r"gang joined.*worker", run.shown)) >= 2)
    assert run.end(signal.SIGINT) == INTERRUPTED
    assert list((hosts.homes["a"] / "kept").glob("checkpoint-*"))
    assert not [*(run.folder / "tmp").iterdir()]
    nothing_is_left(hosts, run)


def test_a_cut_host_ends_its_ranks_and_gets_them_again(hosts: SshHosts, start: Callable[..., Run]) -> None:
    run = start(JOB, "--workers", "2", "--hosts", "a,b,c")
    run.until(lambda: run.step() > 10)
    hosts.network.cut("c")
    try:
        run.until(lambda: not hosts.processes("c"), END_SECONDS)
        assert not hosts.left("c")
        before = run.step()
        run.until(lambda: run.step() > before + 10)
        run.until(lambda: "worker_1: lost with c, starts again when that is back" in run.shown)
    finally:
        hosts.network.heal("c")
    run.until(lambda: re.search(r"gang joined.*worker_1", run.shown) is not None)
    assert run.end(signal.SIGTERM) == INTERRUPTED
    nothing_is_left(hosts, run)


def copied(hosts: SshHosts, kept: str, among: Sequence[str] = NAMES) -> str:
    """The newest checkpoint of which members on these hosts hold a copy, if it has steps."""
    files = [path.name for name in among for path in (hosts.homes[name] / kept / rundir.COPIES).glob("checkpoint-*.pt")]
    return max((file for file in files if not file.endswith(f"-{0:010}.pt")), default="")


@pytest.mark.timeout(400)  # of three runs, on a busy machine
def test_ranks_of_a_host_that_stays_away_go_to_others(hosts: SshHosts, folder: Path) -> None:
    """Three runs share the cut: one has rank 0 elsewhere, the others there, whose disk is lost with it."""
    patience = ("--host-timeout", "20", "--checkpoint-interval", "0.5", "--resume", "0")
    some = ("--workers", "3", "--hosts", "a,b,c,d", "--role", "keeper=d,b")
    with contextlib.ExitStack() as stack:

        def begin(kept: str, *words: str) -> Run:
            return stack.enter_context(contextlib.closing(Run(hosts, folder / kept, *words, *patience, kept=kept)))

        stays = begin("stays", f"{JOB}:KEPT", *some)
        grpo = begin("grpo", *GRPO)
        grpo.until(lambda: "this run as a page" in grpo.shown)  # ps starts faster, and neither is to end before the cut
        moves = {"learner_0": grpo, "ps_0": begin("ps", *PS)}
        for run in moves.values():
            run.until(lambda run=run: copied(hosts, run.kept, "abc"))  # type: ignore[misc]
        stays.until(lambda: stays.step() > 40)
        hosts.network.cut("d")
        try:
            for process in clients(hosts):
                if "d" in process.cmdline():
                    process.kill()  # it would notice the cut in 15 s
            stays.until(lambda: not hosts.processes("d"))
            newest = {rank: copied(hosts, run.kept, "abc") for rank, run in moves.items()}
            why = "moves from d, away for HOST_TIMEOUT=20 s, to"
            stays.until(lambda: f"worker_2: {why} a\n" in stays.shown and f"keeper_0: {why} b\n" in stays.shown)
            before = stays.step()
            stays.until(lambda: stays.step() > before + 10)
            assert stays.places() == {
                "lead_0": "a", "worker_0": "b", "worker_1": "c", "worker_2": "a", "keeper_0": "b"}  # fmt: skip
            (hosts.homes["a"] / "stays" / "over").touch()
            assert stays.process.wait(DEADLINE) == 0, stays.shown
            for rank, run in moves.items():
                assert run.process.wait(DEADLINE) == 0, run.shown
                found = re.search(rf"{rank}: {why} ([abc]); the other ranks start again with it\n", run.shown)
                assert found, run.shown
                assert re.findall(r"resumed .*file=(\S+)", run.shown) == [newest[rank]]
                assert run.shown.splitlines()[-1].endswith(f"checkpoints and report in {found[1]}:{run.kept}")
                require_result(hosts.homes[found[1]] / run.kept, rank)
        finally:
            hosts.network.heal("d")
        nothing_is_left(hosts, stays)


def require_result(directory: Path, rank: str) -> None:
    """The run of which `rank` was rank 0 has made all its steps, and the checkpoint and the report say so."""
    summary = json.loads((directory / rundir.SUMMARY).read_text())
    assert summary["state"] == "finished"
    newest = checkpoint.Checkpoints(directory, summary["job"]).newest()
    assert newest is not None
    assert newest.step == summary["steps"]
    if rank == "ps_0":
        assert not counted(newest.state["ledger"], json.loads((directory / rundir.DONE).read_text()))
    else:
        assert (summary["steps"], newest.state["tokens"]) == (UPDATES, summary["result"]["tokens"])


def test_a_killed_run_leaves_nothing_on_hosts(hosts: SshHosts, start: Callable[..., Run]) -> None:
    run = start(JOB, "--workers", "1", "--hosts", "a,b")
    run.until(lambda: run.step() > 1)
    run.end(signal.SIGKILL)
    nothing_is_left(hosts, run)


@pytest.mark.parametrize(
    ("option", "hosts_option", "words", "line"),
    [
        ("", "a,nowhere", [], "rolecall: nowhere: cannot be reached ("),
        ("HostName 127.0.0.1", "nowhere", [], "rolecall: nowhere: cannot be reached ("),
        ("UserKnownHostsFile /dev/null", "a", [], "rolecall: a: its host key is not known here; run `ssh a` once"),
        ("IdentityFile {folder}/stranger", "a", [], "rolecall: a: refuses the login ("),
        ("", "a", ["--python", "/no/python"], "rolecall: a: has no Python at /no/python; "),
        ("", "a", ["--python", "{bare}"], "has no Rolecall; install"),
    ],
    ids=["no such host", "nothing listens", "unknown key", "no login", "no Python", "no Rolecall"],
)
def test_a_host_that_cannot_be_used_is_a_line_and_exit_code_2(
    hosts: SshHosts, folder: Path, option: str, hosts_option: str, words: list[str], line: str
) -> None:
    bare = folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    config = folder / "config"
    first = f"Host {hosts_option.split(',')[-1]}\n  {option.format(folder=hosts.folder)}\n" if option else ""
    text = (hosts.folder / "config").read_text()
    if option.startswith("IdentityFile"):
        text = text.replace(f"IdentityFile {hosts.folder / 'user'}\n", "")
    config.write_text(first + "Host *\n" + text)
    script = folder / "ssh"
    script.write_text((hosts.folder / "bin" / "ssh").read_text().replace(str(hosts.folder / "config"), str(config)))
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "rolecall", "run", "rl", "--hosts", hosts_option]
    command += [word.format(bare=bare) for word in words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == USAGE
    (shown,) = done.stderr.splitlines()
    assert line in shown
    assert not (folder / "runs").exists()
