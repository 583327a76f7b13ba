"""What the page shows: of gangs in every state, of counters that grow or begin anew, of what a run has left."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolecall import telemetry
from rolecall.declare import describe
from rolecall.gang.protocol import Query, RoleSpec, WorkerStatus
from rolecall.messages.codec import encode_line
from rolecall.messages.queries import Question
from rolecall.observe.page import rates, state
from rolecall.observe.page.rates import Rates, quantile
from rolecall.observe.page.state import GangView, MemberView
from rolecall.rank import stats
from rolecall.rank.queries import Replies
from rolecall.record.history import Event, Goal, History, Point, Start
from tests.record import histories

ROLES = (RoleSpec("agent", 1, 1, 1, elastic=False), RoleSpec("observer", 3, 1, 8, elastic=True))
AGENT, FIRST, SECOND, THIRD = ("agent", 0), ("observer", 0), ("observer", 1), ("observer", 2)
JOB = replace(describe.describe("rl"), roles=ROLES)
NOW = 2000.0


def works(generation: int = 2, **values: Any) -> MemberView:
    return MemberView(WorkerStatus(generation, "running", **values), heard=0.25, node="here:8000")


def trained() -> History:
    """Two generations: an observer was lost in the first, which a kill of rank 0's worker ended."""
    run = histories.journal()
    run.record([Start(1, 0), Goal(475.0), *(Point("score", step, float(step), step) for step in range(1, 11))])
    run.happened("lost", 1, "killed", "the worker of observer_1 ended: killed")
    run.happened("ended", 1, "crashed", "agent_0: Traceback\nValueError: <b>broken</b>")
    run.record([Start(2, 8), Point("score", 12, 12.0, 4.0), Point("loss", 12, 0.5, 4.0), Point("age", 12, 1.5, 4.0)])
    return run.history


def shown(gang: GangView, run: History | None = None, counted: Rates | None = None, **values: Any) -> dict[str, Any]:
    """The state, as a browser reads it."""
    run, rates = run or trained(), counted or Rates()
    made = state.of_gang(JOB, gang, run, rates, settings={"SEED": 1}, now=NOW, **values)
    return json.loads(json.dumps(made, allow_nan=False))


def words(gang: GangView) -> dict[str, tuple[str, str]]:
    return {rank["name"]: (rank["health"], rank["word"]) for rank in shown(gang)["ranks"]}


# ---- ranks


def test_each_rank_has_a_word_for_its_state() -> None:
    members = {AGENT: works(phase="saving"), FIRST: works(), SECOND: MemberView(WorkerStatus(2, "ended", "crashed"))}
    gang = GangView("running", number=2, ranks=(AGENT, FIRST, SECOND), lost={SECOND: "killed"}, members=members)
    assert words(gang) == {
        "agent_0": ("good", "saving"),
        "observer_0": ("good", "running"),
        "observer_1": ("bad", "crashed"),
        "observer_2": ("idle", "not started"),
    }


def test_nobody_runs_once_the_run_is_over() -> None:
    members = {AGENT: MemberView(WorkerStatus(2, "ended", "finished")), FIRST: works(), SECOND: works(phase="saving")}
    members[THIRD] = MemberView(WorkerStatus(2, "ended", "crashed"))
    before = shown(GangView("finished", number=2, ranks=tuple(members), members=members))
    summary = {"state": "finished", "reason": "", "settings": {}}
    after = {rank["name"]: (rank["health"], rank["word"]) for rank in state.ended(before, summary)["ranks"]}
    assert after == {
        "agent_0": ("good", "finished"),
        "observer_0": ("idle", "has left"),
        "observer_1": ("idle", "has left"),
        "observer_2": ("bad", "crashed"),
    }


STATES = [
    (MemberView(), ("idle", "waiting")),
    (MemberView(WorkerStatus(2, "joining", phase="loading")), ("idle", "loading")),
    (MemberView(WorkerStatus(2, "running"), leaving=True), ("idle", "leaving")),
    (MemberView(WorkerStatus(2, "ended", "drained")), ("idle", "drained")),
    (MemberView(WorkerStatus(2, "ended", "finished")), ("good", "finished")),
    (MemberView(WorkerStatus(2, "ended", "stuck")), ("bad", "stuck")),
    (MemberView(WorkerStatus(2, "ended", "lost")), ("bad", "lost")),
]


def test_a_member_that_joins_is_no_alarm() -> None:
    joining = (
        (MemberView(), "joining"),
        (MemberView(WorkerStatus(2, "loading", phase="loading")), "joining (loading)"),
        (MemberView(WorkerStatus(2, "ready")), "joining (ready)"),
        (MemberView(WorkerStatus(2, "ended", "stopped")), "joining"),
    )
    for member, word in joining:
        gang = GangView("running", lost={FIRST: "replaced"}, joining=frozenset({FIRST}), members={FIRST: member})
        assert words(gang)["observer_0"] == ("idle", word)


def test_a_lost_member_is_lost_until_it_joins_again() -> None:
    lost = {FIRST: "unreachable", SECOND: "replaced", THIRD: "left"}
    members = {
        FIRST: works(),
        SECOND: MemberView(WorkerStatus(2, "ended", "stopped")),
        THIRD: MemberView(WorkerStatus(2, "ready")),
    }
    found = words(GangView("running", ranks=(AGENT, FIRST, SECOND, THIRD), lost=lost, members=members))
    assert found["observer_0"] == ("bad", "lost: unreachable")
    assert found["observer_1"] == ("bad", "lost: replaced")
    assert found["observer_2"] == ("idle", "ready")
    assert words(GangView("running", ranks=(AGENT, THIRD), lost=lost))["observer_2"] == ("idle", "has left")
    assert words(GangView("gathering", lost=lost, members=members))["observer_0"] == ("good", "running")


@pytest.mark.parametrize(("member", "expected"), STATES)
def test_a_members_word(member: MemberView, expected: tuple[str, str]) -> None:
    assert words(GangView("running", members={FIRST: member}))["observer_0"] == expected


def test_absent_ranks_have_a_state() -> None:
    assert words(GangView("gathering")) == {
        "agent_0": ("bad", "missing"),
        "observer_0": ("bad", "missing"),
        "observer_1": ("idle", "not started"),
        "observer_2": ("idle", "not started"),
    }
    silent = GangView("running", ranks=(AGENT, FIRST), lost={FIRST: "silent"}, members={AGENT: works()})
    assert words(silent)["observer_0"] == ("bad", "lost: silent")
    assert set(words(GangView("finished")).values()) == {("idle", "has left")}


# ---- the run


def test_generations_say_why_they_ended() -> None:
    first, second = shown(GangView("running", number=2))["generations"]
    assert (first["number"], first["step"], first["cause"]) == (1, 0, "crashed")
    assert first["reason"] == "ValueError: <b>broken</b>"
    assert [one["reason"] for one in first["lost"]] == ["the worker of observer_1 ended: killed"]
    assert first["began"] <= first["ended"] <= second["began"]
    assert (second["step"], second["ended"], second["cause"]) == (8, None, "")


def test_generations_have_joins_and_stays() -> None:
    run = trained()
    for event in (Event("stayed", 2), Event("joined", 2, reason="observer_1-2", count=2)):
        run.add(event)
    state = shown(GangView("running", number=2), run)
    first, second = state["generations"]
    assert (first["joined"], first["stayed"]) == ([], 0)
    assert [(one["count"], one["reason"]) for one in second["joined"]] == [(2, "observer_1-2")]
    assert second["stayed"] == 1
    assert (state["ranks_joined"], state["workers_stayed"]) == (2, 1)


def test_untrained_and_killed_generations_are_listed() -> None:
    run = History([Event("ended", 1, "failed", "agent_0: ImportError"), Start(2, 0), Start(3, 5, 9.0, "restarted")])
    rows = state.generations(run)
    assert [(row["number"], row["began"] is None, row["cause"]) for row in rows] == [
        (1, True, "failed"),
        (2, False, "restarted"),
        (3, False, ""),
    ]
    assert rows[1]["ended"] == rows[2]["began"]


def test_the_state_has_what_the_page_shows() -> None:
    one = shown(
        GangView("gathering", "observer_0 left", 3.0, ("2 observer",), 2), summary={"state": "x", "settings": {}}
    )
    assert (one["state"], one["missing"], one["generation"], one["step"]) == ("gathering", ["2 observer"], 2, 12)
    assert one["curve"]["goal"] == 475.0
    assert one["curve"]["score"][-1] == [12, 14.0, 12.0]
    assert one["curve"]["loss"] == [[12, 14.0, 0.5]]
    assert one["settings"] == {"SEED": 1}
    assert one["summary"] == {"state": "x"}


# ---- rates


def reply(at: float, calls: float, fast: float = 0.0, started: float = 1.0, **values: float) -> dict[str, Any]:
    """A caller of `act` at the agent: of its `calls`, `fast` took at most 1 ms, and the others from 5 to 10 ms."""
    buckets = [fast if bound <= 0.005 else calls for bound in telemetry.LATENCY] + [calls]
    counts = {"calls": calls, "failures": calls / 10, "sent": 8 * calls, "received": 4 * calls}
    act = {**counts, "buckets": buckets, "roles": ["agent"]}
    return {"started": started, "at": at, "methods": {"act": act}, "values": values, "log": []}


def take(counted: Rates, replies: dict[Any, Any]) -> None:
    counted.take(replies, replies)


def test_calls_are_summed_over_callers() -> None:
    counted = Rates()
    take(counted, {FIRST: reply(10.0, 100), SECOND: reply(500.0, 0)})
    (link,) = counted.links()
    assert (link.calls, link.p50, counted.calls(FIRST)) == (0.0, None, None)
    take(counted, {FIRST: reply(12.0, 300, 150), SECOND: reply(502.0, 100, 75)})
    (link,) = counted.links()
    assert (link.caller, link.callees, link.method) == ("observer", ("agent",), "act")
    assert (link.calls, link.failures, link.sent, link.received) == (150.0, 15.0, 1200.0, 600.0)
    assert counted.calls(FIRST) == 100.0
    assert link.p50 is not None
    assert link.p99 is not None
    assert link.p50 < 0.005 < link.p99 <= 0.01


def test_restarted_counters_have_no_rate_yet() -> None:
    counted = Rates()
    take(counted, {FIRST: reply(10.0, 1000)})
    take(counted, {FIRST: reply(12.0, 1100)})
    take(counted, {FIRST: reply(14.0, 5000, started=1.5)})  # on another machine
    assert counted.calls(FIRST) is None
    take(counted, {FIRST: reply(3.0, 7, started=2.0)})
    assert counted.calls(FIRST) is None
    assert counted.links()[0].calls == 0.0
    take(counted, {FIRST: reply(5.0, 27, started=2.0)})
    assert counted.calls(FIRST) == 10.0
    take(counted, {FIRST: reply(7.0, 1, started=2.0)})  # a torn file of counters was dropped
    assert counted.calls(FIRST) is None
    assert counted.links()[0].calls == 0.0


def test_queues_have_a_depth_and_a_rate() -> None:
    counted = Rates()
    for at, items in ((10.0, 40.0), (12.0, 60.0)):
        samples = {"depth": 3.0, "size": 8.0, "items": items}
        take(counted, {AGENT: {**reply(at, 1), "queues": {"samples": samples}}, FIRST: reply(at, 1)})
    (queue,) = shown(GangView("running", members={AGENT: works()}), counted=counted)["queues"]
    assert queue == {"name": "samples", "owner": "agent_0", "depth": 3.0, "size": 8.0, "items": 10.0}
    take(counted, {AGENT: {**reply(14.0, 1), "queues": {"new": {"depth": 1.0, "size": 2.0, "items": 1.0}}}})
    assert [(queue.name, queue.items) for queue in counted.queues()] == [("new", None)]


def test_weights_say_who_is_behind_and_what_was_saved() -> None:
    counted = Rates()
    held = {
        AGENT: {"version": 41.0},
        FIRST: {"version": 41.0, "received": 300.0, "saved": 100.0},
        SECOND: {"version": 38.0, "received": 200.0, "saved": 400.0},
        THIRD: {"received": 1.0},  # no complete version yet
    }
    take(counted, {key: {**reply(1.0, 1), "weights": {"policy": each}} for key, each in held.items()})
    (weights,) = shown(GangView("running"), counted=counted)["weights"]
    assert (weights["name"], weights["members"]) == ("policy", 3)
    assert (weights["newest"], weights["oldest"], weights["oldest_at"]) == (41.0, 38.0, "observer_1")
    assert (weights["received"], weights["saved"]) == (500.0, 500.0)


def test_values_that_the_job_logs_are_shown() -> None:
    assert shown(GangView("running"))["logged"] == {"age": 1.5}


CHANGES: list[dict[str, Any]] = [{"at": math.nan}, {"methods": {"act": {"buckets": [1]}}}, {"log": [1]}]
WRONG = [None, [], "text", {}, {"error": "did not answer within 2 s"}, *({**reply(1.0, 1), **each} for each in CHANGES)]


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_report_affects_one_rank(wrong: Any) -> None:
    counted = Rates()
    take(counted, {FIRST: wrong, SECOND: reply(1.0, 1)})
    assert list(counted.problems) == [FIRST]
    assert counted.newest(SECOND) is not None
    ranks = shown(GangView("running", members={FIRST: works(), SECOND: works()}), counted=counted)["ranks"]
    assert [bool(rank.get("problem")) for rank in ranks] == [False, True, False, False]


def test_quantiles_lie_in_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(0.5, [0, 10, 10, 10], bounds) == 1.5
    assert quantile(0.99, [50, 50, 100, 100], bounds) == pytest.approx(3.96)
    assert quantile(0.99, [50, 50, 50, 100], bounds) == 4.0  # beyond the last bound
    assert quantile(0.5, [0, 0, 0, 0], bounds) is None


def event(time: float, text: str) -> dict[str, Any]:
    return {"time": time, "level": "error", "text": text}


def test_errors_of_all_ranks_come_in_order_and_limited() -> None:
    counted = Rates()
    logs = {FIRST: [event(30.0, "late"), event(10.0, "first")], SECOND: [event(20.0, "x" * 9999)]}
    take(counted, {key: {**reply(1.0, 1), "log": log} for key, log in logs.items()})
    errors = shown(GangView("running", members={FIRST: works(), SECOND: works()}), counted=counted)["errors"]
    assert [(each["rank"], each["time"]) for each in errors] == [
        ("observer_0", 10.0),
        ("observer_1", 20.0),
        ("observer_0", 30.0),
    ]
    assert len(errors[1]["text"]) == state.MAX_TEXT


# ---- what a supervisor reports


class Workers:
    """What `stats` uses of a WorkerManager."""

    worker = None

    def __init__(self, directory: Path) -> None:
        _, self.metrics, self.files = telemetry.build_supervisor(directory, is_rank0=False)
        self.metrics.worker_starts.inc(3)


def test_a_supervisor_reports_its_workers_counters_and_its_own_errors(tmp_path: Path) -> None:
    program = """
import sys
from dataclasses import replace
from pathlib import Path
from rolecall import telemetry
telemetry.use_directory(Path(sys.argv[1]))
metrics = telemetry.build_worker(telemetry.WORKER, "agent", True)
metrics.rpc_calls.labels("act").inc(5)
metrics.rpc_callee.labels("act", "agent").set(1)
metrics.rpc_latency_seconds.labels("act").observe(0.003)
metrics.step.set(7)
metrics.queue_depth.labels("samples").set(2)
metrics.queue_size.labels("samples").set(8)
metrics.queue_items.labels("samples").inc(30)
metrics.weights_version.labels("policy").set(5)
metrics.weights_bytes.labels("policy").inc(100)
metrics.weights_saved_bytes.labels("policy").inc(300)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)

    async def steps() -> dict[str, Any]:
        answers = asyncio.Queue[Any]()

        async def handle(_: Question) -> rates.Stats:
            return await stats.read(Workers(tmp_path), 0.0)  # type: ignore[arg-type]

        async def post(number: str, result: Any) -> None:
            await answers.put(json.loads(encode_line(result)))

        Replies(handle).take([Query("1", "stats")], post)
        return await asyncio.wait_for(answers.get(), 30)

    telemetry.setup_logging("json", "info", stream=(tmp_path / "log").open("w"))
    telemetry.recent.clear()
    telemetry.log().info("nothing to see")
    telemetry.log(role="agent").error("broken <b>", problem="disk", exception="Traceback\nOSError")
    counted = Rates()
    take(counted, {FIRST: asyncio.run(steps())})
    report = counted.newest(FIRST)
    assert report is not None
    assert (report.methods["act"].calls, report.methods["act"].roles) == (5.0, ["agent"])
    assert report.methods["act"].buckets[telemetry.LATENCY.index(0.005)] == 1.0
    assert report.methods["act"].buckets[telemetry.LATENCY.index(0.002)] == 0.0
    assert (report.values["step"], report.values["worker_starts"]) == (7.0, 3.0)
    assert report.queues == {"samples": rates.QueueCounters(depth=2.0, size=8.0, items=30.0)}
    assert report.weights == {"policy": rates.WeightsCounters(version=5.0, received=100.0, saved=300.0)}
    (logged,) = report.log
    assert (logged.level, logged.text) == ("error", "broken <b> problem=disk\nTraceback\nOSError")
