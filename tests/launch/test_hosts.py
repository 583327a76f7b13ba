"""`rolecall run --hosts`, with an `ssh` that runs its command on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from rolecall import __main__, config, machine
from rolecall.declare import flags, sources
from rolecall.errors import USAGE, UsageError
from rolecall.launch import host, hosts, ssh
from rolecall.launch.here import Here
from rolecall.launch.host import Connection, HostedProcess
from rolecall.messages.codec import decode_line
from rolecall.messages.hosts import Files, FromHost, Killed, Ready, ToHost
from tests.launch import fake_ssh
from tests.ports import free_ports

DEADLINE = 60.0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        yield Path(folder)


# ---- the options


def placed(*words: str) -> hosts.Placement:
    return hosts.placement(flags.take_options(words)[0])


def test_hosts_are_a_list_or_a_file(tmp_path: Path) -> None:
    assert placed("--hosts", "a, me@b,a").hosts == ("a", "me@b", "a")
    file = tmp_path / "hosts"
    file.write_text("# ours\na\n\nb  # the fast one\n")
    placement = placed(f"--hosts={file}", "--role", "observer=b,c", "--python", "/opt/python")
    assert (placement.hosts, placement.roles, placement.python) == (("a", "b"), {"observer": ("b", "c")}, "/opt/python")
    assert placement.all == ("a", "b", "c")
    assert placed("--hosts", "a").python == sys.executable


def test_other_arguments_are_left_to_the_job() -> None:
    options, others = flags.take_options(["--observers", "3", "--hosts", "a,b", "--plain", "--seed=2"])
    assert (options.hosts, others) == ("a,b", ["--observers", "3", "--plain", "--seed=2"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--hosts", ""], "--hosts: names no host"),
        (["--hosts", "a,,b"], "--hosts"),
        (["--hosts=-oProxyCommand=x"], "--hosts"),
        (["--hosts", "a b"], "--hosts"),
        (["--hosts", "a", "--role", "observer"], "--role observer"),
        (["--hosts", "a", "--role", "observer=b", "--role", "observer=c"], "--role observer=c"),
        (["--role", "observer=b"], "--role"),
        (["--python", "/opt/python"], "--python"),
    ],
)
def test_wrong_options_are_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}"):
        placed(*words)


def test_ranks_are_dealt_out_in_order_unless_their_role_has_hosts() -> None:
    run = hosts.Hosts(hosts.Placement(("a", "b", "a"), {"observer": ("c", "b")}, "python"), "rl")
    members = [("agent", 0), ("observer", 0), ("observer", 1), ("observer", 2), *(("other", n) for n in range(3))]
    assert [run.place(*member).host for member in members] == ["a", "c", "b", "c", "b", "a", "a"]
    asyncio.run(run.close())


def test_closing_again_closes_nothing_else() -> None:
    run = hosts.Hosts(hosts.Placement(("a",), {}, "python"), "rl")
    asyncio.run(run.close())
    with tempfile.TemporaryFile() as file:  # has the number of the file that was closed
        asyncio.run(run.close())
        file.write(b"open")


def test_what_is_sent_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("pi.py", "beside.py", "parts/__init__.py", "parts/one.py", "data.csv"):
        (tmp_path / name).touch()
    target, files = hosts.sent_files(f"{tmp_path}/pi.py:OTHER")
    assert target == "pi.py:OTHER"
    assert {*files.files} == {"pi.py", "beside.py", "parts/__init__.py", "parts/one.py"}
    assert hosts.sent_files("rl") == ("rl", Files({}))
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    with pytest.raises(UsageError, match="a folder of its own"):
        hosts.sent_files(f"{tmp_path}/pi.py")


def test_the_command_asks_nothing_and_has_no_secret() -> None:
    command = ssh.connect("b", Path("/tmp/50%/socket"), ["/opt/my python", "-m", "rolecall.launch.hosted"])
    assert command[-3:] == ["--", "b", "exec '/opt/my python' -m rolecall.launch.hosted"]
    assert {"BatchMode=yes", "ControlPath=/tmp/50%%/socket", "ServerAliveInterval=5"} <= {*command}


# ---- hosts that cannot be used


def test_each_host_that_cannot_be_used_is_a_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in fake_ssh.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    names = [*fake_ssh.FAULTS, *fake_ssh.FAULTY]
    assert __main__.main(["run", "rl", "--hosts", ",".join(names)]) == USAGE
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["rolecall", name] for name in names]
    for line, advice in zip(
        lines,
        (
            "check its name",
            "`ssh stranger` once",
            "ssh-keygen -R",
            "ssh-copy-id",
            "same version",
            "install",
            "--python",
        ),
        strict=True,
    ):
        assert advice in line
    assert not (tmp_path / "runs").exists()


def test_a_host_with_other_versions_of_python_or_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in fake_ssh.install(short_path).items():
        monkeypatch.setenv(name, value)
    run = hosts.Hosts(hosts.Placement(("patched", "newer"), {}, "/opt/python"), "rl")

    async def connect() -> None:
        await run.connect()
        await run.close()

    monkeypatch.setattr(host, "__version__", fake_ssh.VERSION)
    monkeypatch.setattr(machine, "versions", lambda: machine.Versions("2.13.0+cpu", "3.11.7"))
    asyncio.run(connect())
    assert capfd.readouterr().err.splitlines() == [
        "rolecall: warning: newer: /opt/python is Python 3.12.1 with torch 2.13.0, and this is Python 3.11.7 with "
        "torch 2.13.0+cpu; ranks may not understand each other: install the same versions, or name another Python "
        "with --python"
    ]


def test_a_role_that_is_not_the_jobs(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in fake_ssh.install(short_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(short_path)
    assert __main__.main(["run", "rl", "--hosts", "a", "--role", "trainer=a"]) == USAGE
    assert "agent, observer" in capfd.readouterr().err
    assert not [*(short_path / "a" / "tmp").iterdir()]


# ---- on a host


@pytest.mark.parametrize(("first", "code"), [(b"", 0), (b'{"kind": "of another version"}\n', USAGE)])
def test_a_host_tells_its_versions_first_and_ends_if_nothing_comes(first: bytes, code: int, short_path: Path) -> None:
    program = "from rolecall.launch import hosted; hosted.SILENCE_SECONDS = 0.5; raise SystemExit(hosted.main())"
    environment = {**os.environ, "TMPDIR": str(short_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(first)
        process.stdin.flush()
        ready = [decode_line(FromHost, line) for line in process.stdout if line.strip()]
        assert [
            (message.version, message.python, message.torch) for message in ready if isinstance(message, Ready)
        ] == [(config.__version__, platform.python_version(), metadata.version("torch"))]
        assert process.wait(DEADLINE) == code
    assert not [*short_path.iterdir()]


def test_ranks_of_a_machine_share_neither_ports_nor_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    machine = Here(ports=range(29400, 29500))
    planned = [*machine.plan({"a_0": 1, "b_0": 1, "c_0": None}), *machine.plan({"b_1": 1})]
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in planned] == ["3", "5", None, "7"]
    ports = [int(variables["PORT"]) for variables in planned]
    assert {*ports} <= {*range(29400, 29500, 2)}
    assert len({*ports, *(int(variables["METRICS_PORT"]) for variables in planned)}) == 8
    for ended, gpu in (("b_1", "7"), ("a_0", "3")):
        machine.forget(ended)
        assert machine.plan({ended: 1})[0]["CUDA_VISIBLE_DEVICES"] == gpu


def test_ports_of_a_run_that_does_not_listen_yet_are_given_to_no_other_run() -> None:
    (first,) = free_ports(1)
    one, other = (Here(ports=range(first, first + 2)) for _ in range(2))
    (planned,) = one.plan({"a_0": None})
    with pytest.raises(UsageError, match="no 1 free ports"):
        other.plan({"a_0": None})
    with socket.create_server(("127.0.0.1", int(planned["PORT"]))):  # its rank can listen
        pass
    one.forget("a_0")
    assert other.plan({"a_0": None})[0]["PORT"] == planned["PORT"]


def test_each_of_two_kills_of_a_part_has_its_answer() -> None:
    async def play() -> None:
        sent: list[ToHost] = []
        connection, output = SimpleNamespace(host="b", send=sent.append), SimpleNamespace()
        process = HostedProcess("observer_1", cast(Connection, connection), cast(asyncio.StreamWriter, output))
        kills = [asyncio.create_task(process.kill_part("worker")) for _ in range(2)]
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        answers = [Killed((f"worker {pid}",), ("worker",)) for pid in (7, 8)]
        for answer in answers:
            process.answer_kill("worker", answer)
        async with asyncio.timeout(DEADLINE):
            assert await asyncio.gather(*kills) == answers

    asyncio.run(play())


# ---- a run


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def agent(home: Path) -> psutil.Process | None:
    """What runs on a host for the run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "hosted" in " ".join(process.cmdline()) and Path(process.cwd()).is_relative_to(home / "tmp"):
                return process
    return None


def test_a_run_on_hosts_survives_one_and_leaves_nothing_behind(short_path: Path) -> None:
    here, there = short_path / "here", short_path / "job"
    for folder in (here, there, here / "tmp"):
        folder.mkdir()
    for name in ("patient.py", "beside.py"):
        shutil.copy(Path(__file__).parents[1] / "hosts" / name, there)
    environment = {
        **os.environ,
        **fake_ssh.install(short_path),
        "MASTER_ADDR": "127.0.0.1",
        "TMPDIR": str(here / "tmp"),
        "LEASE_SECONDS": "2",
    }
    command = [sys.executable, "-m", "rolecall"]
    words = ["run", str(there / "patient.py"), "--plain", "--hosts", "a,b", "--checkpoint-dir", "kept"]
    with subprocess.Popen([*command, *words], cwd=here, env=environment, stdout=subprocess.PIPE, text=True) as run:
        try:
            kept, logs = short_path / "a" / "kept", here / "kept" / "logs"
            until(lambda: (kept / "history.jsonl").exists() or run.poll() is not None, "no step was made")
            (there / "beside.py").unlink()  # the hosts have it
            first = agent(short_path / "b")
            assert first
            first.kill()
            until(lambda: (logs / "worker_0.log").read_text().count("began in") >= 2, "the lost rank is not back")
            listed = subprocess.run([*command, "ps", "kept"], cwd=here, env=environment, capture_output=True, text=True)
            assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["lead_0", "worker_0"]
            assert [line.split()[2].partition(":")[0] for line in listed.stdout.splitlines()[1:]] == ["a", "b"]
            (kept / "over").touch()
            shown, _ = run.communicate(timeout=DEADLINE)
        finally:
            run.send_signal(signal.SIGTERM)
    assert run.returncode == 0
    assert "worker_0: lost with b, starts again when that is back" in shown
    assert shown.splitlines()[-1] == "rolecall: finished; logs in kept; checkpoints and report in a:kept"
    assert (kept / "DONE").exists()
    fetched = subprocess.run(
        [*command, "fetch", "kept", "--to", "copy"], cwd=here, env=environment, capture_output=True, text=True
    )
    assert fetched.returncode == 0, fetched.stderr
    assert (here / "copy" / "summary.json").read_bytes() == (kept / "summary.json").read_bytes()
    assert [*(here / "copy").glob("checkpoint-*.pt")]
    for place in (here, short_path / "a", short_path / "b"):
        assert not [*(place / "tmp").iterdir()], place
