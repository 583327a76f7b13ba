"""`rolecall stacks` with ranks that wait for each other for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rolecall.observe.stacks import command as stacks
from tests.integration.cluster import ROOT, TOKEN, Cluster, until

MakeCluster = Callable[..., Cluster]
FILE = ROOT / "tests" / "integration" / "deadlocked.py"


@pytest.fixture
def ask(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Starts the job; what is asked is asked again until what is waited for has lasted long enough to be told."""
    monkeypatch.setenv("JOB_TOKEN", TOKEN)

    def start(kind: str) -> Callable[..., str]:
        job = cluster(JOB=str(FILE), KIND=kind, LEASE_SECONDS="60", RPC_TIMEOUT="120", STUCK_SECONDS="600")
        job.start(2, described=True)
        until(lambda: job.members() == 2 and job.first.metric("worker_state", state="running"), "all ranks' start")

        def asked(text: str, *words: str) -> str:
            def output() -> str:
                assert stacks.run([job.first.environment["METRICS_PORT"], *words]) == 0
                printed.append(capsys.readouterr().out)
                return printed[-1] if text in printed[-1] else ""

            printed = [""]
            try:
                return str(until(output, text))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{printed[-1]}") from None

        return asked

    return start


def test_a_lock_and_a_call_back_are_a_deadlock_while_another_rank_holds_the_gil(ask: Any) -> None:
    asked = ask("lock")
    text = asked("deadlock:")
    assert "deadlock: lead_0 > worker_0 > lead_0\n" in text
    assert (
        "serves take_lock for worker_0: waits for the lock LOCK\n    Lead.take_lock (tests/integration/deadlocked.py:"
        in text
    )
    assert "s for lead_0 (take_lock)\n" in text
    text = asked("worker_1: no heartbeat for", "worker-1")
    assert "lead_0: running" not in text
    assert "  serves hold_the_gil for worker_0: " in text
    assert "holds the GIL\n    Worker.hold_the_gil (" in text
    assert "s: a thread holds the GIL" in text
    reply = json.loads(asked("deadlocks", "worker", "--json"))
    assert reply["deadlocks"] == [["lead_0", "worker_0", "lead_0"]]
    assert [*reply["ranks"]] == ["worker_0", "worker_1"]
    assert {(each["rank"], each["to"], each["what"]) for each in reply["waits"]} == {
        ("lead_0", "worker_0", "ask_back"),
        ("worker_0", "worker_1", "hold_the_gil"),
        ("worker_0", "lead_0", "take_lock"),
    }


def test_threads_that_wait_for_answers_which_need_one_of_them_are_a_deadlock(ask: Any) -> None:
    """The last of the threads are in their wait, in the same line as the others, a moment after their calls are out."""
    asked = ask("threads")
    asked("deadlock:")
    text = asked("it carries out 64 calls: a further one waits until one of them ends")
    assert "deadlock: lead_0 > worker_1 > lead_0" in text
    assert "64 threads: serves ask_rank_0 for lead_0: waits" in text
    assert "for lead_0 (64 calls of ask_worker)" in text
