"""A run that a cluster holds, followed from here, with a cluster that does as it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.errors import CRASHED, FAILED, UsageError
from rolecall.launch import control, followed
from rolecall.launch.followed import Followed, Seen
from rolecall.messages.control import KillRank, ListedRank, ListRanks, ScaleRole, StopRun
from rolecall.observe import targets
from rolecall.record import rundir

DEADLINE = 30.0  # seconds; a fail-safe
AGENT = ListedRank("agent", 0, 0, "up", "node1")


class Scripted:
    """A cluster that is looked at until there is no answer left: the last one stays."""

    engine, token_file = "slurm", ""

    def __init__(self, directory: Path, *answers: Seen | UsageError) -> None:
        self.directory, self.answers = directory, [*answers]
        self.done, self.looks = list[str](), 0
        self.refusal: UsageError | None = None

    def manifest(self) -> str:
        return ""

    async def submit(self) -> str:
        if self.refusal:
            raise self.refusal
        return "submitted job 7"

    async def look(self) -> Seen:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, UsageError):
            raise answer
        return answer

    async def written(self) -> AsyncIterator[tuple[str, bytes]]:
        yield "agent_0", b"one\ntw"
        yield "observer_1", b"three\n"
        yield "agent_0", b"o\n"

    async def kill(self, role: str, ordinal: int, part: str) -> str:
        self.done.append(f"kill {role} {ordinal}")
        return f"killed {role}_{ordinal}"

    async def scale(self, role: str, count: int) -> str:
        raise UsageError("a job's size is fixed")

    async def end(self, now: bool) -> None:
        self.done.append("end now" if now else "drain")
        if now or "stubborn" not in self.done:
            self.answers = [Seen(code=143)]

    async def fetch(self) -> None:
        self.done.append("fetch")
        (self.directory / rundir.SUMMARY).write_text("{}")

    async def delete(self, keeps_state: bool) -> str:
        self.done.append(f"delete {keeps_state}")
        return "its checkpoints stay in the claim" if keeps_state else ""

    async def close(self) -> None:
        self.done.append("close")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "POLL_SECONDS", 0.01)


def follow(cluster: Scripted, keeps: bool = False, meanwhile: Callable[[], None] | None = None) -> int:
    """Follows the run; `meanwhile` runs in another thread once the cluster is looked at."""

    async def main() -> int:
        async with asyncio.timeout(DEADLINE):
            run = Followed(describe.describe("rl"), Settings(), cluster, cluster.directory, keeps=keeps, live=False)
            following = asyncio.create_task(run.run())
            while meanwhile and not cluster.looks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if meanwhile:
                await asyncio.to_thread(meanwhile)
            return await following

    return asyncio.run(main())


def test_the_code_of_the_run_is_that_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9/metrics"
    cluster = Scripted(tmp_path / "run", Seen(waits="no node is free"), Seen((AGENT,), url=url), Seen(code=0))
    assert follow(cluster) == 0
    assert cluster.done == ["fetch", "delete False", "close"]
    assert (cluster.directory / "logs" / "agent_0.log").read_text() == "one\ntwo\n"
    lines = capfd.readouterr().out.splitlines()
    shown = [
        "rolecall: submitted job 7",
        "waiting: no node is free",
        "rolecall: this run as a page: http://127.0.0.1:9/",
    ]
    assert [line for line in lines if line in shown] == shown
    assert {"agent_0: one", "agent_0: two", "observer_1: three"} < {*lines}
    assert lines[-1] == f"rolecall: finished; logs, summary.json in {cluster.directory}"
    last = targets.last_run(cluster.directory)
    assert last
    assert (last.code, last.about.engine) == (0, "slurm")


def test_a_run_that_fails_says_why_and_keeps_its_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = Scripted(tmp_path, Seen(code=FAILED, reason="agent-0: OOMKilled"))
    assert follow(cluster) == FAILED
    assert cluster.done == ["fetch", "delete True", "close"]
    output = capfd.readouterr()
    assert "rolecall: agent-0: OOMKilled" in output.err
    assert output.out.endswith(
        f"failed (exit code 3); logs, summary.json in {tmp_path}; its checkpoints stay in the claim\n"
    )


def test_nothing_is_deleted_of_a_run_that_is_kept(tmp_path: Path) -> None:
    cluster = Scripted(tmp_path, Seen(code=0))
    assert follow(cluster, keeps=True) == 0
    assert cluster.done == ["fetch", "close"]


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    cluster = Scripted(tmp_path / "run", Seen())
    cluster.refusal = UsageError("sbatch: no such partition")
    with pytest.raises(UsageError, match="no such partition"):
        follow(cluster)
    assert not cluster.directory.exists()
    assert cluster.done == ["close"]


def test_commands_reach_the_run(tmp_path: Path) -> None:
    cluster, run = Scripted(tmp_path, Seen((AGENT,))), str(tmp_path)

    def command() -> None:
        assert control.ask(run, ListRanks()).ranks == (AGENT,)
        assert control.ask(run, KillRank("agent", 0, "")).done == "killed agent_0"
        with pytest.raises(UsageError, match="rank 0 does not run yet; `rolecall ps"):
            targets.parse(run)
        with pytest.raises(UsageError, match="size is fixed"):
            control.ask(run, ScaleRole("observer", 3))
        assert control.ask(run, StopRun(now=False)).seconds > 0

    assert follow(cluster, meanwhile=command) == 130
    assert cluster.done == ["kill agent 0", "drain", "fetch", "delete True", "close"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    cluster = Scripted(tmp_path, Seen((AGENT,)))
    cluster.done.append("stubborn")

    def interrupt() -> None:
        for done in ("drain", "end now"):
            os.kill(os.getpid(), number)
            while done not in cluster.done:
                time.sleep(0.01)

    assert follow(cluster, meanwhile=interrupt) == 130
    assert cluster.done[1:3] == ["drain", "end now"]


def test_a_run_outlives_the_terminal_that_follows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = Scripted(tmp_path, Seen((AGENT,)))
    assert follow(cluster, meanwhile=lambda: os.kill(os.getpid(), signal.SIGHUP)) == CRASHED
    assert cluster.done == ["close"]
    assert f"--name {tmp_path.name} finds it" in capfd.readouterr().out


def test_a_cluster_that_is_silent_is_asked_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    silent = UsageError("slurmctld does not answer")
    cluster = Scripted(tmp_path, silent, silent, Seen(code=0))
    assert follow(cluster) == 0
    assert capfd.readouterr().out.count("slurmctld does not answer") == 1


def test_a_cluster_that_stays_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "SILENT_SECONDS", 0.05)
    cluster = Scripted(tmp_path, UsageError("no route"))
    assert follow(cluster) == CRASHED
    assert cluster.done == ["close"]


def test_what_is_not_fetched_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise UsageError("the claim is not reached")

    cluster = Scripted(tmp_path, Seen(code=0))
    monkeypatch.setattr(cluster, "fetch", fails)
    assert follow(cluster) == CRASHED
    assert cluster.done == ["close"]


def test_a_run_that_another_process_follows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    other = targets.LocalRun(1, psutil.Process(1).create_time(), (targets.Address("agent_0", ""),))
    (tmp_path / targets.RANKS).write_bytes(msgspec.json.encode(other))
    cluster = Scripted(tmp_path, Seen())
    with pytest.raises(rundir.TakenError):
        follow(cluster)
    assert cluster.done == ["close"]
