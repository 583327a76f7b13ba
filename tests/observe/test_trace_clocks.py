"""The clocks of a trace's ranks: the offset that is worked out is off by no more than is stated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.errors import UsageError
from rolecall.observe.trace.clocks import DRIFT, WINDOW_NS, Clocks
from rolecall.record import records
from rolecall.record.records import SpanRecord
from tests.observe.traces import MS, UNIX, Worker, line, write

SECOND = 1000 * MS
OFFSETS = st.integers(0, 10**16)
DELAYS = st.integers(20_000, 5 * MS)
DRIFTS = st.floats(-0.4 * DRIFT, 0.4 * DRIFT)  # of two clocks, whose difference then drifts by less than DRIFT
CALLS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 20 * SECOND), DELAYS, DELAYS, DELAYS),
    min_size=2,
    max_size=40,
)


def observe(clocks: Clocks, caller: Worker, called: Worker, times: tuple[int, int, int, int]) -> None:
    """A round trip, whose `times` are those of its sending, arrival, answer and return."""
    sent, came, left, back = times
    there = {"came": called.clock(came), "left": called.clock(left)}
    clocks.observe(caller.process, called.process, sent=caller.clock(sent), back=caller.clock(back), **there)


@settings(deadline=None, max_examples=100)
@given(offsets=st.tuples(OFFSETS, OFFSETS), drifts=st.tuples(DRIFTS, DRIFTS), calls=CALLS)
def test_the_stated_error_holds(
    offsets: tuple[int, ...], drifts: tuple[float, ...], calls: list[tuple[bool, int, int, int, int]]
) -> None:
    workers = [Worker("ps", place, place, offset=offsets[place], drift=drifts[place]) for place in range(2)]
    clocks = Clocks(worker.process for worker in workers)
    for turned, sent, there, handler, back in calls:
        came = sent + there
        observe(clocks, workers[turned], workers[not turned], (sent, came, came + handler, came + handler + back))
    clocks.solve()
    alignment, align = clocks.alignment(workers[1].process), clocks.aligner(workers[1].process)
    assert alignment.error_ns is not None
    times = [sent for _, sent, *_ in calls]
    for time in (min(times), sum(times) // len(times), max(times)):
        difference = align(workers[1].clock(time)) - workers[0].clock(time)
        assert abs(difference) <= alignment.error_ns + 100  # the precision of floating-point numbers


def test_a_clock_that_drifts_is_followed() -> None:
    one, other = Worker("ps"), Worker("trainer", rank=1, offset=-(10**11), drift=0.9 * DRIFT)
    clocks = Clocks([one.process, other.process])
    for sent in range(0, 100 * SECOND, WINDOW_NS):
        came, left, back = sent + 50_000, sent + MS, sent + MS + 50_000
        clocks.observe(one.process, other.process, sent, other.clock(came), other.clock(left), back)
    clocks.solve()
    for time in (0, 50 * SECOND, 99 * SECOND):
        assert abs(clocks.aligner(other.process)(other.clock(time)) - time) < 80_000
    assert other.clock(99 * SECOND) - other.offset - 99 * SECOND > 8 * MS  # what a fixed offset would be off by


def test_processes_of_one_host_share_a_clock_and_others_fall_back_to_the_wall_clock() -> None:
    first, near = Worker("ps", host="one"), Worker("trainer", rank=1, host="one")
    moved = Worker("trainer", 1, rank=2, host="one", offset=10**15)  # a pod of this name on a machine that booted later
    far = Worker("trainer", 2, rank=3, host="two", offset=7, wall=3 * MS)
    clocks = Clocks(worker.process for worker in (first, near, moved, far))
    clocks.solve()
    methods = [clocks.alignment(worker.process).method for worker in (first, near, moved, far)]
    assert methods == ["reference", "same host", "wall clock", "wall clock"]
    assert clocks.aligner(near.process)(5) == 5
    assert clocks.aligner(moved.process)(moved.clock(5)) == 5
    assert clocks.aligner(far.process)(far.clock(5)) == 5 + 3 * MS
    assert clocks.alignment(far.process).error_ns is None
    assert "error not known" in str(clocks.alignment(far.process))
    assert clocks.unix_ns(5) == UNIX + 5
    assert clocks.from_unix((UNIX + 5 * MS) / 1e9) == pytest.approx(5 * MS, abs=500)


# ---- the records


def test_a_torn_last_line_is_skipped_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole, torn, broken = Worker("ps"), Worker("trainer", rank=1), Worker("trainer", 1, rank=2)
    for worker in (whole, torn, broken):
        worker.span("step", 0, MS)
        worker.span("step", MS, 2 * MS)
    write(tmp_path, whole, torn, broken)
    path = tmp_path / "trainer_0-1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    path = tmp_path / "trainer_1-1.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'["span", 7]\n' + third)
    (tmp_path / "ps_7-1.jsonl").write_text('["span"')
    (tmp_path / "ps_8-1.jsonl").write_text("")
    (tmp_path / "trace.json").write_text("{}")
    trace = records.read(tmp_path)
    assert [[span.name for span in one] for one in trace.recordings] == [["step", "step"], ["step"], ["step"]]
    problems = trace.damage()
    assert len(problems) == 3
    assert all("does not begin with a process" in problem for problem in problems[:2])
    assert "trainer_1-1.jsonl: 1 damaged lines are left out" in problems[2]
    assert second


def test_a_record_is_read_as_it_was_written() -> None:
    process = Worker("trainer", 3, rank=4, offset=12).process
    assert records.parse(line(process)) == process
    span = SpanRecord("00000000000000ff", "", "exchange", "client", 5, 9, 77, {"to": "ps_0", "sent": 8}, "ff")
    assert records.parse(line(span)) == span
    odd = '["span", "a", "", "x", "odd", 1, 2, 3, {}, ""]'
    negative = '["span", "a", "", "x", "client", 3, 2, 3, {}, ""]'
    number = '["span", 1, "", "x", "client", 1, 2, 3, {}, ""]'
    for damaged in ("", "[]", '["process", {"job": 1}]', odd, negative, number, '["process", {}]', "[" * 100_000):
        with pytest.raises(ValueError, match=r"record|process|line|Expecting"):
            records.parse(damaged)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        records.read(tmp_path / "nothing")
