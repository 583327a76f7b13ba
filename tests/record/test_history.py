"""A run's history: what is kept of it, what a resume cuts, and what a reader makes of a file that is torn."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rolecall.record import history, rundir
from rolecall.record.disk import Disk
from rolecall.record.history import SPACING, History, Point
from rolecall.record.journal import Journal


def steps(*numbers: int, at: float = 0.0, kind: history.Kind = "score") -> list[history.Record]:
    """A record a second, whose value is ten times its step."""
    return [(kind, step, at + place + 1, 10.0 * step) for place, step in enumerate(numbers)]


def generation(number: int, step: int, at: float) -> list[history.Record]:
    return [("start", step, at - 5, number), ("train", step, at, 0)]


def shown(run: History, kind: str = "score") -> list[tuple[int, float]]:
    return [(point.step, point.seconds) for point in run.curves[kind]]


def again(rows: list[dict[str, Any]]) -> History:
    """What a reader makes of these rows, through JSON."""
    run = History()
    for row in rows:
        run.add(json.loads(json.dumps(row)))
    return run


def state(run: History) -> tuple[Any, ...]:
    changes = run.ends, run.lost, run.joined, run.stayed, run.stalled, run.events
    return (run.curves, run.starts, run.generations, run.began, run.seconds, changes, run.goal)


def interrupted() -> tuple[History, list[dict[str, Any]]]:
    """Two generations, of which the second goes on from step 2 of four; and its rows."""
    run = History()
    rows = run.record([*generation(1, 0, 100.0), ("goal", 0, 100.0, 95.0)])
    both = [*steps(1, 2, 3, 4, at=100.0), *steps(1, 2, 3, 4, at=100.0, kind="done")]
    rows += run.record(sorted(both, key=lambda record: record[2]))
    rows += run.lose_rank("killed")
    rows += run.end_generation("crashed")
    rows += run.record([*generation(2, 2, 500.0), *steps(3, at=500.0), *steps(3, at=500.0, kind="done")])
    return run, rows


# ---- what is recorded


def test_seconds_are_those_of_training() -> None:
    """They count from the start of training, and continue in the next generation; the time between does not count."""
    run, _ = interrupted()
    assert shown(run) == [(1, 1.0), (2, 2.0), (3, 5.0)]
    assert run.seconds == 5.0
    assert [(start.generation, start.step, start.seconds, start.after) for start in run.starts] == [
        (1, 0, 0.0, ""),
        (2, 2, 4.0, "crashed"),
    ]
    assert run.generations == 2
    assert run.ends == {"crashed": 1}
    assert run.lost == {"killed": 1}
    assert run.goal == 95.0


def test_a_resume_cuts_what_came_after_its_checkpoint() -> None:
    run, rows = interrupted()
    for read in (run, again(rows)):
        assert [point.value for point in read.curves["score"]] == [10.0, 20.0, 30.0]
        assert [point.step for point in read.curves["done"]] == [1, 2, 3]
        assert read.greatest == Point(3, 5.0, 30.0)  # not step 4's, which was lost
    assert state(again(rows)) == state(run)


def test_repeated_step_is_recorded_once() -> None:
    run, _ = interrupted()
    run.record([*generation(3, 3, 900.0), *steps(3, 4, at=900.0)])
    assert [step for step, _ in shown(run)] == [1, 2, 3, 4]


def test_a_resume_from_nothing_keeps_the_time_and_the_causes() -> None:
    run, _ = interrupted()
    run.record(generation(3, 0, 900.0))
    assert shown(run) == []
    assert run.seconds == 5.0
    assert run.ends == {"crashed": 1, "restarted": 1}  # rank 0 ended itself, and did not record how
    assert run.last == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_left_out(value: float) -> None:
    run = History()
    assert len(run.record([*generation(1, 0, 0.0), ("score", 1, 1.0, value)])) == 1
    assert shown(run) == []


def test_kept_points_grow_with_the_logarithm_of_time() -> None:
    run, kept = History(), []
    run.record(generation(1, 0, 0.0))
    for step in range(1, 200_001):
        kept += run.record([("score", step, step / 10, float(step))])
    assert len(kept) < 6000
    points = run.curves["score"]
    assert [point.step for point in points[:100]] == list(range(1, 101))
    gaps = [after.seconds - before.seconds for before, after in itertools.pairwise(points)]
    assert max(gaps) <= 20_000 / SPACING + 0.11
    assert run.greatest == Point(200_000, 20_000.0, 200_000.0)  # though it was not kept


def test_the_last_points_are_kept_at_the_end() -> None:
    run = History()
    run.record([*generation(1, 0, 0.0), *steps(*range(1, 2001))])
    run.record([("score", 2001, 2000.5, 7.0)])
    assert run.curves["score"][-1].step < 2001
    (row,) = run.close()
    assert (row["step"], row["value"]) == (2001, 7.0)
    assert run.close() == []


def test_the_rate_is_of_training_alone() -> None:
    run = History()
    assert run.per_second() is None
    run.record([*generation(1, 0, 0.0), *steps(1, 2, 3, kind="done")])
    run.record([*generation(2, 1, 500.0), *steps(2, 3, at=600.0, kind="done")])
    assert [(before.step, after.step) for before, after in run.spans()] == [(2, 3)]
    assert run.per_second() == 10.0


# ---- rows and files


@pytest.mark.parametrize("seed", range(20))
def test_a_history_is_read_as_it_was_recorded(seed: int) -> None:
    chance, run, rows, now, step = random.Random(seed), History(), [], 0.0, 0
    for number in range(1, chance.randint(2, 12)):
        step = chance.randint(0, step)
        rows += run.record(generation(number, step, now))
        for _ in range(chance.randint(0, 40)):
            now += chance.choice([0.0, 0.0001, 0.3, 20.0])
            step += 1
            rows += run.record([(chance.choice(history.CURVES), step, now, chance.random())])
        if chance.random() < 0.7:
            rows += run.end_generation(chance.choice(["killed", "drained"]))
        if chance.random() < 0.3:
            rows += run.lose_rank("silent")
        rows += run.record([(chance.choice(history.CHANGES), step, now, chance.random())])
        rows += run.stall("ended", chance.random())
        rows += run.keep_workers(chance.randint(0, 3), number)
        rows += run.add_ranks(chance.randint(0, 3), number, "observer_1-3")
    rows += run.close()
    assert state(again(rows)) == state(run)


def test_joins_and_stays_are_counted() -> None:
    run = History()
    assert run.keep_workers(0, 1) == []
    run.keep_workers(2, 2)
    run.add_ranks(3, 2, "observer_1-3")
    run.add_ranks(1, 2, "observer_4")
    assert (run.joined, run.stayed, run.lost, run.ends) == (4, 2, {}, {})
    assert [(event.what, event.count, event.reason, event.cause) for event in run.events] == [
        ("stayed", 2, "", ""),
        ("joined", 3, "observer_1-3", ""),
        ("joined", 1, "observer_4", ""),
    ]


def test_events_of_earlier_versions_are_read() -> None:
    lost = {"kind": "event", "what": "lost", "generation": 1, "time": 5.0, "cause": "killed", "reason": "x"}
    (event,) = again([lost]).events
    assert (event.what, event.cause, event.count) == ("lost", "killed", 1)


def write(directory: Path, rows: list[dict[str, Any]]) -> None:
    (directory / rundir.HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    _, rows = interrupted()
    write(tmp_path, rows)
    whole = (tmp_path / rundir.HISTORY).read_bytes()
    last = len(json.dumps(rows[-1])) + 1
    for cut in range(1, last):
        (tmp_path / rundir.HISTORY).write_bytes(whole[:-cut])
        assert state(history.read(tmp_path)) == state(again(rows if cut == 1 else rows[:-1]))


KINDS = [b'{"kind": []}', b'{"kind": "x"}', b'{"kind": "score"}', b'{"kind": "start"}']
TEXT_FOR_STEP = b'{"kind": "score", "step": "x", "seconds": 1, "value": 1}'


@pytest.mark.parametrize(
    "line", [b"", b"\x00" * 40, b"\xff\xfe", b"7", b"[]", b"{}", *KINDS, TEXT_FOR_STEP, b"[" * 100_000]
)
def test_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    _, rows = interrupted()
    write(tmp_path, rows)
    expected = state(history.read(tmp_path))
    with (tmp_path / rundir.HISTORY).open("ab") as file:
        file.write(line + b"\n")
    assert state(history.read(tmp_path)) == expected


def save(journal: Journal, rows: list[dict[str, Any]]) -> None:
    journal.add(rows)
    asyncio.run(journal.save())


def test_a_journal_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    first = Journal(tmp_path, Disk())
    save(first, first.history.record([*generation(1, 0, 0.0), *steps(1, 2)]))
    file = tmp_path / rundir.HISTORY
    file.write_bytes(file.read_bytes() + b'{"kind": "sco')
    second = Journal(tmp_path, Disk())
    save(second, second.history.record([*generation(2, 1, 50.0), *steps(2, 3, at=50.0)]))
    save(second, second.history.record(steps(4, at=53.0)))
    assert state(history.read(tmp_path)) == state(second.history)
    assert [step for step, _ in shown(second.history)] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_failed_write_is_logged_once_and_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    kept = Journal(directory, Disk())
    (directory / rundir.HISTORY).mkdir()  # as good as a full disk, for root too
    for step in range(1, 4):
        save(kept, kept.history.record([*(generation(1, 0, 0.0) if step == 1 else []), *steps(step, at=step)]))
    assert capsys.readouterr().out.count("history cannot be written") == 1
    (directory / rundir.HISTORY).rmdir()
    save(kept, kept.history.record(steps(4, at=4.0)))
    assert [step for step, _ in shown(history.read(directory))] == [1, 2, 3, 4]
    assert [path.name for path in directory.iterdir()] == [rundir.HISTORY]
