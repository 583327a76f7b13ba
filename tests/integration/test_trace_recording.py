"""Traces of real ranks: both sides of each call, nested calls, a worker that is killed; and nothing while it is off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.observe import ask
from rolecall.observe.trace.copies import TraceCopies
from rolecall.record.records import SpanRecord, read
from tests.integration.cluster import DEADLINE, ROOT, TOKEN, Cluster, until

MakeCluster = Callable[..., Cluster]
FILE = ROOT / "tests" / "integration" / "nesting.py"
ERROR = """worker_{0} raised ValueError: on purpose
Traceback (most recent call last):
  File "{file}", line {line}, in broken
    raise ValueError("on purpose")
ValueError: on purpose"""


def start(cluster: MakeCluster, **settings: str) -> Cluster:
    return cluster(JOB=str(FILE), CHECKPOINT_INTERVAL="0.5", LOG_INTERVAL="1000", **settings).start(2, described=True)


def stop(job: Cluster) -> None:
    """Ends the training, and checks that every rank finishes, and what was raised at the lead."""
    (job.checkpoints / "files" / "stop").write_text("")
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    error = (job.checkpoints / "files" / "error").read_text()
    line = 1 + FILE.read_text().splitlines().index('        raise ValueError("on purpose")')
    assert error in [ERROR.format(ordinal, file=FILE, line=line) for ordinal in (0, 1)]


def test_a_run_has_both_sides_of_each_call_of_all_generations(cluster: MakeCluster) -> None:
    job = start(cluster, TRACE="1")
    folder = job.checkpoints / "trace"
    killed = folder / "worker_1-1.jsonl"
    until(lambda: killed.exists() and '"prepare"' in killed.read_text(), "spans of a worker")
    job.member(1).kill_worker()
    until(lambda: job.first.metric("generation") == 2, "another generation")
    job.trains()
    stop(job)
    assert not [rank.name for rank in job.ranks.values() if "has not collected" in rank.text()]
    traces = {(one.process.name, one.process.generation): [*one] for one in read(folder).recordings}
    assert {*traces} == {(name, number) for name in ("lead_0", "worker_0", "worker_1") for number in (1, 2)}
    assert {"prepare", "inner", "outer"} <= {span.name for span in traces["worker_1", 1]}
    check_calls({name: spans for (name, number), spans in traces.items() if number == 2})


def cancelled(span: SpanRecord) -> bool:
    """Whether a call ended before its handler, because another one has failed."""
    return str(span.attributes.get("error")).endswith("was cancelled")


def check_calls(traces: dict[str, list[SpanRecord]]) -> None:
    """Checks the spans of one generation that ended in order, by rank."""
    spans = {span.id: (name, span) for name, some in traces.items() for span in some}
    clients = [(name, span) for name, span in spans.values() if span.kind == "client" and not cancelled(span)]
    servers = {span.parent: (name, span) for name, span in spans.values() if span.kind == "server"}
    assert {span.id for _, span in clients} <= {*servers}
    # a process may end between the answer of its last call and the callback that records it
    assert len(servers) - len(clients) <= len(traces)
    for name, client in clients:
        where, server = servers[client.id]
        assert (server.name, server.attributes["from"]) == (client.name, name)
        assert client.attributes["to"] == where
        assert client.start_ns <= server.start_ns <= server.ran_ns <= server.end_ns <= client.end_ns  # one machine
    above = {"inner": ("prepare", "later"), "outer": ("step",), "later": ("step",)}
    for span in (span for _, span in clients if span.name in above):
        assert spans[span.parent][1].name in above[span.name]
    calls = {span.name: span for _, span in clients}
    assert {*above, "broken"} <= {*calls}
    assert calls["broken"].attributes["error"].endswith("raised ValueError: on purpose")
    assert calls["inner"].attributes["sent"] > 0
    assert calls["inner"].attributes["received"] > 0
    every = [span for _, span in spans.values()]
    for span in every:
        if span.name == "prepare":
            turn = spans[span.parent][1]
            assert (turn.name, turn.kind, span.attributes) == ("outer", "server", {"number": 1})
            assert turn.start_ns <= turn.attributes["began_ns"] <= span.start_ns <= span.end_ns <= turn.end_ns
        if span.name == "broken" and span.kind == "server":
            assert span.attributes["error"] == "ValueError: on purpose"
    reductions = [span for span in every if span.name == "all-reduce"]
    assert {spans[span.parent][1].name for span in reductions} == {"outer"}
    assert reductions[0].attributes == {"bytes": 16}
    steps = [span.attributes["step"] for span in traces["lead_0"] if span.name == "step"]
    assert steps == [*range(steps[0], steps[0] + len(steps))]
    assert {"connecting", "loading", "restoring", "saving", "checkpoint"} <= {span.name for span in traces["lead_0"]}


def test_without_trace_nothing_is_recorded_until_somebody_asks(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JOB_TOKEN", TOKEN)
    job = start(cluster)
    job.is_whole()
    temporary = Path(job.temporary)
    assert not [*temporary.rglob("trace-*")]

    def query(what: str, arguments: dict[str, Any], to: list[str] | None = None) -> dict[str, Any]:
        port = job.first.environment["METRICS_PORT"]
        return asyncio.run(asyncio.wait_for(ask.ask(port, what, arguments, to), DEADLINE))

    assert query("trace", {"seconds": 60}) == {"lead_0": {}, "worker_0": {}, "worker_1": {}}
    copies = TraceCopies(tmp_path / "copies", "worker_1")

    def recorded() -> bool:
        copies.add(query("spans", {"have": copies.have}, ["worker_1"])["worker_1"])
        if not copies.have:
            return False
        (recording,) = read(copies.folder).recordings
        assert (recording.process.generation, recording.clock.error_ns) == (1, 0)  # one machine
        return {"outer", "inner", "prepare", "all-reduce"} <= {span.name for span in recording}

    until(recorded, "spans of a worker")
    stop(job)
    assert not (job.checkpoints / "trace").exists()
    assert not [*temporary.rglob("trace-*")]
