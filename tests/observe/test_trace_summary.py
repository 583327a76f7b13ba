"""The summary of a trace: what each rank did in the steps, and for whom it waited."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.summary import Summary
from tests.observe.traces import MS, Worker, call, write

STEPS = 10


def summary_of(folder: Path, *workers: Worker) -> Summary:
    return Summary(Calls(write(folder, *workers)))


def text_of(summary: Summary) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(summary.render())
    return capture.get()


def queueing(offset: int = 0, error: int = 0) -> list[Worker]:
    """Steps of 100 ms. Trainer 1 computes for 59 ms, and waits for 41 ms for ps_0: 0.7 ms network, 28 ms handler, 12.3
    ms queueing. One quick call tells what the network takes."""
    server, trainer = Worker("ps"), Worker("trainer", 1, rank=1, offset=offset, error=error)
    for number in range(STEPS):
        at = number * 100 * MS
        trainer.span("step", at, at + 100 * MS)
        server.span("step", at, at + 100 * MS, step=number + 1)
        if number == 0:
            sent, came, left, back = 59.0, 59.35, 99.65, 100.0
        else:
            sent, came, left, back = 59.0, 59.35 + 12.3, 59.35 + 12.3 + 28, 100.0
        times = [at + round(time * MS) for time in (sent, came, left, back)]
        call(trainer, server, "exchange", *times)
        trainer.span("wait", times[0], times[3])
    return [server, trainer]


def test_a_call_is_split_into_network_queueing_and_handler(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *queueing())
    trainer = summary.ranks["trainer_1"]
    assert summary.steps == STEPS
    assert summary.nanoseconds / 1e9 == pytest.approx(1.0)
    assert trainer.spent["computing"] / summary.nanoseconds == pytest.approx(0.59)
    assert trainer.spent["waiting"] / summary.nanoseconds == pytest.approx(0.41)
    times = trainer.calls["ps_0", "exchange"]
    assert times.count == STEPS
    parts = (0.7 * STEPS, 12.3 * (STEPS - 1), 28 * (STEPS - 1) + 40.3, 0)
    assert [time / MS for time in times.parts] == pytest.approx(parts)
    server = summary.ranks["ps_0"]
    assert server.spent["handling"] / MS == pytest.approx(28 * (STEPS - 1) + 40.3)
    assert server.spent["computing"] == 0  # it is there to be called
    assert server.spent["idle"] > 0
    text = text_of(summary)
    assert "ps: 10 steps in 1.00 s, 100.0 ms each" in text
    assert "41.0 %" in text
    assert "exchange at ps_0" in text


def test_summary_is_independent_of_clocks(tmp_path: Path) -> None:
    first = summary_of(tmp_path / "same", *queueing())
    second = summary_of(tmp_path / "other", *queueing(offset=10**14, error=MS))
    calls = [summary.ranks["trainer_1"].calls["ps_0", "exchange"] for summary in (first, second)]
    assert calls[0] == calls[1]
    assert "rank 0's clock" not in text_of(first)
    assert "trainer_1: within 2.000 ms of rank 0's clock" in text_of(second)


def test_the_wait_for_an_answer_that_is_given_later_is_held(tmp_path: Path) -> None:
    """Synchronous updates: the server answers trainer_0 when trainer_1, which computes for longer, has called too."""
    server = Worker("ps")
    fast, slow = (Worker("trainer", place, rank=place + 1, pid=5000 + place) for place in range(2))
    for number in range(STEPS):
        at = number * 100 * MS
        server.span("step", at, at + 100 * MS)
        times = (at + time * MS for time in (20, 21, 98, 99))
        call(fast, server, "exchange", *times, served_by=7, returned_ns=at + 22 * MS)
        fast.span("wait", at + 20 * MS, at + 99 * MS)
        call(slow, server, "exchange", at + 95 * MS, at + 96 * MS, at + 98 * MS, at + 99 * MS, served_by=8)
        slow.span("wait", at + 95 * MS, at + 99 * MS)
        for trainer in (fast, slow):
            trainer.span("step", at, at + 99.5 * MS)
    summary = summary_of(tmp_path, server, fast, slow)
    times = summary.ranks["trainer_0"].calls["ps_0", "exchange"]
    assert times.parts.held / times.total == pytest.approx(76 / 79)


def test_phases_collectives_and_waits_for_a_turn(tmp_path: Path) -> None:
    first, other = Worker("master"), Worker("trainer", rank=1, pid=77)
    first.span("step", 0, 50 * MS)
    first.span("step", 80 * MS, 100 * MS)
    first.span("saving", 50 * MS, 80 * MS)
    first.span("checkpoint", 80 * MS, 90 * MS, thread=55)  # beside the training
    call(first, other, "train", 0, MS, 40 * MS, 41 * MS, returned_ns=2 * MS, began_ns=10 * MS)
    first.span("wait", 0, 41 * MS)
    other.span("all-reduce", 20 * MS, 35 * MS)
    call(first, other, "train", 80 * MS, 81 * MS, 98 * MS, 99 * MS, returned_ns=82 * MS, began_ns=81 * MS)
    first.span("wait", 80 * MS, 99 * MS)
    summary = summary_of(tmp_path, first, other)
    shares = {name: {what: time / MS for what, time in rank.spent.items()} for name, rank in summary.ranks.items()}
    assert shares["master_0"] == {"waiting": 60, "computing": 10, "checkpoint": 30}
    assert {what: shares["trainer_0"][what] for what in ("handling", "all-reduce")} == {
        "handling": 32,
        "all-reduce": 15,
    }
    times = summary.ranks["master_0"].calls["trainer_0", "train"]
    assert [time / MS for time in times.parts] == [4, 9, 30 + 17, 0]  # queueing for its turn


def test_a_large_message_is_compared_with_large_ones(tmp_path: Path) -> None:
    server, trainer = Worker("ps"), Worker("trainer", rank=1)
    for number, (size, time) in enumerate([(1100, 1), (1500, 3), (1_100_000, 10), (1_200_000, 14)]):
        at = number * 20 * MS
        client = call(trainer, server, "exchange", at, at + time * MS / 2, at + time * MS / 2, at + time * MS)
        client.attributes["sent"] = size
    calls = Calls(write(tmp_path, server, trainer))
    parts = [calls.parts(trainer.process, span) for span in trainer.spans]
    assert [(one.network / MS, one.queueing / MS) for one in parts if one] == [(1, 0), (1, 2), (10, 0), (10, 4)]


TIMES = st.lists(st.integers(0, 200), min_size=4, max_size=4)
CALLS = st.lists(st.tuples(TIMES, st.permutations(range(3)), st.booleans()), max_size=15)
SPANS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 3)), max_size=15)


@settings(deadline=None, max_examples=60)
@given(calls=CALLS, spans=SPANS)
def test_every_moment_is_counted_once(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[list[int], list[int], bool]],
    spans: list[tuple[int, int, int]],
) -> None:
    workers = [Worker("ps", place, place, pid=100 + place) for place in range(3)]
    for times, (caller, called, _), waits in calls:
        sent, came, left, back = sorted(times)
        call(workers[caller], workers[called], "f", sent, came, left, back, served_by=200 + came)
        if waits:
            workers[caller].span("wait", came, back)
    for start, end, place in spans:
        name = ("step", "saving", "all-reduce", "forward")[place]
        workers[place % 3].span(name, min(start, end), max(start, end))
    summary = summary_of(tmp_path_factory.mktemp("trace"), *workers)
    assert all(sum(rank.spent.values()) <= summary.nanoseconds for rank in summary.ranks.values())
