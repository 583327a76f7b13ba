"""A trace as Chrome's trace event format: what its description asks for, and what Perfetto's reader needs."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import UsageError
from rolecall.observe.trace import perfetto
from rolecall.observe.trace.calls import Calls
from rolecall.record import history, records
from rolecall.record.history import History, Start
from tests.observe.traces import MS, UNIX, Worker, call, write

Event = dict[str, Any]
ARROW = {"ts", "id", "tid"}
PHASES = {"X": {"ts", "dur", "tid"}, "i": {"ts", "s", "tid"}, "M": {"args"}, "s": ARROW, "f": {*ARROW, "bp"}}


def training() -> list[Worker]:
    """A server and two trainers, whose calls overlap; one answer comes late, one call has no other side."""
    server = Worker("ps", offset=50_000 * MS)
    trainers = [Worker("trainer", place, rank=place + 1, offset=place * 7 * MS, pid=5000) for place in range(2)]
    for number in range(5):
        at = number * 20 * MS
        server.span("step", at, at + 20 * MS, step=number + 1)
        call(trainers[0], server, "exchange", at + MS, at + 2 * MS, at + 9 * MS, at + 10 * MS, returned_ns=at + 3 * MS)
        call(trainers[0], server, "exchange", at + 3 * MS, at + 4 * MS, at + 9 * MS, at + 12 * MS)
        call(trainers[1], server, "exchange", at + MS, at + 8 * MS, at + 9 * MS, at + 10 * MS, served_by=10)
    trainers[1].span("lost", 30 * MS, 60 * MS, "client", to="ps_9", error="gone")
    server.span("garbage collection", 50 * MS, 51 * MS, thread=9)
    server.span("dropped", 70 * MS, 70 * MS, spans=7)
    return [server, *trainers]


def file_of(folder: Path, workers: list[Worker], run: History | None = None) -> dict[str, Any]:
    spans = perfetto.write_file(Calls(write(folder, *workers)), folder / "out.json", run)
    assert spans == sum(len(worker.spans) for worker in workers)
    content: dict[str, Any] = json.loads((folder / "out.json").read_text())
    check(content["traceEvents"])
    return content


def check(events: list[Event]) -> None:
    """The rules of the format, and that slices of a track nest, without which Perfetto drops some."""
    tracks = defaultdict[tuple[int, int], list[Event]](list)
    for event in events:
        missing = {"name", "ph", "pid", *PHASES[event["ph"]]} - set(event)
        assert not missing, (event, missing)
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
        if event["ph"] == "i":
            assert event["s"] in "gpt"
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        ends = list[float]()
        for event in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            end = round(event["ts"] + event["dur"], 3)
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.001, event
            ends.append(end)
    named = {(one["pid"], one.get("tid")) for one in events if one["ph"] == "M" and one["name"].endswith("_name")}
    assert {(pid, None) for pid, _ in tracks} | set(tracks) <= named
    for ph in "sf":  # an arrow's end lies in a slice of its track
        for event in [one for one in events if one["ph"] == ph]:
            assert any(
                slice["ts"] <= event["ts"] <= slice["ts"] + slice["dur"] for slice in tracks[event["pid"], event["tid"]]
            )


def test_the_file_keeps_the_rules_of_the_format(tmp_path: Path) -> None:
    content = file_of(tmp_path, training())
    assert set(content) == {"traceEvents", "displayTimeUnit", "metadata"}
    assert content["metadata"]["job"] == "ps"
    assert content["metadata"]["start-unix-ns"] == pytest.approx(UNIX, abs=1000)


def test_a_rank_is_a_process_and_a_call_leads_to_its_handler(tmp_path: Path) -> None:
    events = file_of(tmp_path, training())["traceEvents"]
    names = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    assert [*names] == ["ps_0", "trainer_0", "trainer_1"]
    starts = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = {one["id"]: one for one in events if one["ph"] == "f"}
    assert len(starts) == len(ends) == 15  # the call without another side has no arrow
    assert starts.keys() == ends.keys()
    assert {one["pid"] for one in ends.values()} == {names["ps_0"]}
    assert all(starts[id]["ts"] <= end["ts"] for id, end in ends.items())
    (first, *_) = [one for one in events if one.get("cat") == "client" and one["pid"] == names["trainer_1"]]
    assert first["args"].pop("id")
    parts = {"network_ms": 8.0, "queueing_ms": 0.0, "handler_ms": 1.0}
    assert first["args"] == {"to": "ps_0", "sent": 8, "received": 8, "generation": 1, **parts}
    queued = [one["args"] for one in events if one.get("cat") == "client" and one["pid"] == names["trainer_0"]]
    assert {(one["network_ms"], one["queueing_ms"]) for one in queued} == {(2.0, 0.0), (2.0, 2.0)}
    assert {one["args"].get("held_ms") for one in events if one.get("cat") == "client"} == {6.0, None}


def test_generations_and_kills_are_on_the_same_time_line(tmp_path: Path) -> None:
    at = UNIX / 1e9
    run = History(
        [
            Start(1, 0, time=at + 1),
            history.Event("lost", 1, "killed", "trainer_1 was killed by SIGKILL", time=at + 2),
            history.Event("joined", 1, reason="trainer_1-2", count=2, time=at + 3),
            history.Event("ended", 1, "crashed", "x", time=at + 4),
            history.Event("stayed", 2, count=2, time=at + 4.5),
            Start(2, 9, 3.0, "crashed", time=at + 5),
        ]
    )
    first, second = Worker("ps"), Worker("ps", generation=2, pid=4001)
    first.span("step", 1000 * MS, 3900 * MS)
    second.span("step", 5000 * MS, 7000 * MS)
    events = file_of(tmp_path, [first, second], run)["traceEvents"]
    generations = [one for one in events if one["name"].startswith("generation") and one["ph"] == "X"]
    assert [(one["name"], round(one["dur"] / 1e6, 1)) for one in generations] == [("generation 1", 3.0)]
    instants = {one["name"]: one for one in events if one["ph"] == "i"}
    joined = "joined: trainer_1-2"
    assert set(instants) == {"lost: killed", joined, "generation 1 ended: crashed", "workers stayed", "generation 2"}
    assert instants[joined]["args"] == {"generation": 1, "ranks": 2}
    assert instants["workers stayed"]["args"] == {"generation": 2, "workers": 2}
    assert instants["lost: killed"]["args"]["reason"] == "trainer_1 was killed by SIGKILL"
    steps = [one["ts"] for one in events if one["name"] == "step"]
    assert steps[1] - steps[0] == pytest.approx(4_000_000, abs=10)
    assert instants["lost: killed"]["ts"] - steps[0] == pytest.approx(1_000_000, abs=10)
    assert len({one["pid"] for one in events if one["name"] == "step"}) == 1  # one process of both generations


def test_a_run_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    write(folder, *training())
    (tmp_path / "history.jsonl").write_text("")
    spans = perfetto.write_file(Calls(records.read(folder)), tmp_path / "out.json", perfetto.history_beside(folder))
    assert spans == 38
    check(json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        perfetto.write_file(Calls(records.read(folder)), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
