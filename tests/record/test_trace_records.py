"""The files of a trace: what is read and what is left out, and one time line whose error is no more than is stated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rolecall.errors import UsageError
from rolecall.record import records
from rolecall.record.clock import DRIFT, WINDOW_NS, Clock, Reading
from rolecall.record.records import Beginning, SpanRecord, line
from tests.observe.traces import MS, UNIX, Worker, write

SECOND = 1000 * MS
DELAYS = st.integers(20_000, 5 * MS)


@example(offset=-4 * MS, drift=0.0, asked=[(0, 5 * MS, 20_000), (20 * SECOND, 20_000, 20_000)])
@given(
    offset=st.integers(-(10**16), 10**16),
    drift=st.floats(-0.9 * DRIFT, 0.9 * DRIFT),
    asked=st.lists(st.tuples(st.integers(0, 60 * SECOND), DELAYS, DELAYS), min_size=1, max_size=30),
)
def test_the_stated_error_holds(offset: int, drift: float, asked: list[tuple[int, int, int]]) -> None:
    def clock(time: int) -> int:  # of the rank, at this time of rank 0
        return offset + round(time * (1 + drift))

    readings = [Reading.between(clock(sent + there), sent, sent + there + back, UNIX) for sent, there, back in asked]
    aligned = Clock(0, readings)
    assert aligned.error_ns is not None
    times = [sent + there for sent, there, _ in asked]
    bound = aligned.error_ns or max(there + back for _, there, back in asked)  # 0: no difference could be seen
    for time in (min(times), sum(times) // len(times), max(times)):
        assert abs(aligned.unix_ns(clock(time)) - UNIX - time) <= bound + 100  # the precision of floating-point numbers


def test_a_clock_that_drifts_is_followed() -> None:
    readings = [Reading(round(time * (1 - DRIFT)), time, 50_000) for time in range(0, 600 * SECOND, SECOND)]
    readings += [Reading(0, 90 * SECOND, 60 * SECOND)]  # worse than another one of its time
    clock = Clock(0, readings)
    for time in (0, 300 * SECOND, 599 * SECOND):
        assert abs(clock.unix_ns(round(time * (1 - DRIFT))) - time) <= DRIFT * WINDOW_NS
    assert 599 * SECOND * DRIFT > 50 * MS  # what a fixed difference would be off by
    assert clock.error_ns == 50_000 + DRIFT * WINDOW_NS


def test_ranks_of_one_machine_share_its_clock() -> None:
    near, far = Reading.between(5 * MS, 4 * MS, 8 * MS, UNIX), Reading.between(9 * MS, 4 * MS, 8 * MS, UNIX)
    assert near == Reading(5 * MS, UNIX + 5 * MS, 0, 4 * MS)
    assert far == Reading(9 * MS, UNIX + 6 * MS, 2 * MS)


def test_clocks_that_rank_0_does_not_share_are_named(tmp_path: Path) -> None:
    near, far = Worker("ps", offset=7), Worker("trainer", rank=1, offset=10**12, error=MS)
    unknown = Worker("trainer", 1, rank=2, offset=9, error=None, wall=3 * MS)
    for worker in (near, far, unknown):
        worker.span("step", MS, 2 * MS, began_ns=worker.offset + MS)
    trace = write(tmp_path, near, far, unknown)
    spans = [span for recording in trace.recordings for span in recording]
    assert [span.start_ns - UNIX for span in spans] == [MS, MS, 4 * MS]
    assert all(span.began_ns == span.start_ns == span.attributes["began_ns"] for span in spans)
    assert trace.clocks() == [
        "trainer_0: within 2.000 ms of rank 0's clock",
        "trainer_1: by its wall clock; error not known",
    ]


def test_a_torn_last_line_is_skipped_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole, torn, broken = Worker("ps"), Worker("trainer", rank=1, error=None), Worker("trainer", 1, rank=2)
    for worker in (whole, torn, broken):
        worker.span("step", 0, MS)
        worker.span("step", MS, 2 * MS)
    write(tmp_path, whole, torn, broken)
    path = tmp_path / "trainer_0-1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    path = tmp_path / "trainer_1-1.jsonl"
    first, _, third, clock = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'["span", 7]\n' + third + b'["clock",1]\n' + clock)
    (tmp_path / "ps_7-1.jsonl").write_text('["span"')
    (tmp_path / "ps_8-1.jsonl").write_text("")
    (tmp_path / "trace.json").write_text("{}")
    trace = records.read(tmp_path)
    assert [[span.name for span in one] for one in trace.recordings] == [["step", "step"], ["step"], ["step"]]
    problems = trace.damage()
    assert len(problems) == 3
    assert all("does not begin with a process" in problem for problem in problems[:2])
    assert "trainer_1-1.jsonl: 2 damaged lines are left out" in problems[2]


def test_a_record_is_read_as_it_was_written() -> None:
    begins = Beginning(Worker("trainer", 3, rank=4, offset=12).process)
    assert records.parse(line(begins)) == begins
    span = SpanRecord("00000000000000ff", "", "exchange", "client", 5, 9, 77, {"to": "ps_0", "sent": 8}, "ff")
    assert records.parse(line(span)) == span
    span.attributes["error"] = "no file \udcff"
    assert records.parse(line(span)).attributes["error"] == "no file ?"
    odd = '["span", "a", "", "x", "odd", 1, 2, 3, {}, ""]'
    negative = '["span", "a", "", "x", "client", 3, 2, 3, {}, ""]'
    number = '["span", 1, "", "x", "client", 1, 2, 3, {}, ""]'
    for damaged in ("", "[]", '["process", {"job": 1}]', odd, negative, number, '["process", {}]', "[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            records.parse(damaged)


def test_a_copy_has_the_name_of_its_rank_and_worker() -> None:
    assert records.copy_name("ps_0", records.file_name(7)) == "ps_0-7.jsonl"
    assert records.copy_name("ps_0", records.file_name(7, join=2)) == "ps_0-7-2.jsonl"
    with pytest.raises(ValueError, match="no file of a trace"):
        records.copy_name("ps_0", "../trace-1-1.jsonl")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        records.read(tmp_path / "nothing")
