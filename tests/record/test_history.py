"""A run's history: what is written of it, what a resume cuts, and what a reader makes of a file that is torn."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest

from rolecall.record import history, rundir
from rolecall.record.files import Disk
from rolecall.record.history import (
    CURVES,
    FULL_POINTS,
    MIN_SPACING,
    SPACING,
    Event,
    Goal,
    History,
    Journal,
    Point,
    Stall,
    Start,
    What,
)
from tests.record.histories import journal, steps


def shown(run: History, name: str = "score") -> list[tuple[int, float]]:
    return [(point.step, point.seconds) for point in run.curves[name]]


def state(run: History) -> tuple[Any, ...]:
    changes = run.ends, run.lost, run.joined, run.stayed, run.stalled, run.events
    return (run.curves, run.last, run.starts, run.generations, run.began, run.seconds, changes, run.goal)


def saved(run: Journal) -> History:
    """What a reader makes of the file."""
    asyncio.run(run.save())
    return history.read(run.path.parent)


def interrupt(run: Journal) -> None:
    """Two generations, of which the second goes on from step 2 of four."""
    run.record([Start(1, 0), Goal(95.0)])
    for step in (1, 2, 3, 4):
        run.record([Point(name, step, 10.0 * step, step) for name in ("score", "done", "entropy")])
    run.happened("lost", 1, "killed")
    run.happened("ended", 1, "crashed")
    run.record([Start(2, 2), *steps(3), *steps(3, name="done")])


# ---- what is recorded


def test_seconds_are_those_of_training(tmp_path: Path) -> None:
    """They count from the start of training, and continue in the next generation; the time between does not count."""
    run = journal(tmp_path)
    interrupt(run)
    for read in (run.history, saved(run)):
        assert shown(read) == [(1, 1.0), (2, 2.0), (3, 5.0)]
        assert read.seconds == 5.0
        assert [(start.generation, start.step, start.seconds, start.after) for start in read.starts] == [
            (1, 0, 0.0, ""),
            (2, 2, 4.0, "crashed"),
        ]
        assert (read.generations, read.ends, read.lost, read.goal) == (2, {"crashed": 1}, {"killed": 1}, 95.0)


def test_a_resume_cuts_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run = journal(tmp_path)
    interrupt(run)
    for read in (run.history, saved(run)):
        assert [point.value for point in read.curves["score"]] == [10.0, 20.0, 30.0]
        assert [point.step for point in read.curves["done"]] == [1, 2, 3]
        assert read.greatest is not None
        assert (read.greatest.step, read.greatest.value) == (3, 30.0)  # not step 4's, which was lost
        assert "entropy" not in read.last


def test_repeated_step_is_recorded_once(tmp_path: Path) -> None:
    run = journal(tmp_path)
    interrupt(run)
    run.record([Start(3, 3), *steps(3, 4), *steps(4, name="entropy")])
    assert [step for step, _ in shown(run.history)] == [1, 2, 3, 4]
    assert state(saved(run)) == state(run.history)
    rows, _ = history.read_rows(run.path)
    scores = [row.step for row in rows if isinstance(row, Point) and row.name == "score"]
    assert scores == [1, 2, 3, 4, 3, 4]  # for readers that keep what was lost


def test_a_resume_from_nothing_keeps_the_time_and_the_causes() -> None:
    run = journal()
    interrupt(run)
    run.record([Start(3, 0)])
    assert shown(run.history) == []
    assert run.history.seconds == 5.0
    assert run.history.ends == {"crashed": 1, "restarted": 1}  # rank 0 ended itself, and did not record how
    assert run.history.last == {}


def test_long_curves_are_thinned(tmp_path: Path) -> None:
    """A month of a point a second would be 2.6 million of each curve."""
    run = journal(tmp_path)
    run.record([Start(1, 0)])
    for step in range(1, 200_001):
        run.record([Point(name, step, float(step), step / 10) for name in ("score", "entropy")])
    asyncio.run(run.save())
    rows, _ = history.read_rows(run.path)
    for name in ("score", "entropy"):
        written = [row.step for row in rows if isinstance(row, Point) and row.name == name]
        assert written[: FULL_POINTS + 5] == [*range(1, FULL_POINTS + 6)]
        assert MIN_SPACING < len(written) < 5 * MIN_SPACING
    for read in (run.history, History(rows)):
        points = read.curves["score"]
        assert [point.step for point in points[:100]] == list(range(1, 101))
        gaps = [after.seconds - before.seconds for before, after in itertools.pairwise(points)]
        assert max(gaps) <= 20_000 / SPACING + 2.1
        assert len(points) < 6000
    assert run.history.greatest is not None
    assert run.history.greatest.step == 200_000  # though it was not kept


def test_long_curves_are_thinned_over_all_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generation begins before the last written step; every second one is of a rank 0 that was started again."""
    full, spacing = 100, 100
    monkeypatch.setattr(history, "FULL_POINTS", full)
    monkeypatch.setattr(history, "MIN_SPACING", spacing)
    run = journal(tmp_path)
    for number in range(1, 11):
        if number % 2:
            asyncio.run(run.save())
            run = journal(tmp_path)
        first = (number - 1) * 500
        run.record([Start(number, first), *steps(*range(first + 1, first + 550))])
    asyncio.run(run.save())
    rows, _ = history.read_rows(run.path)
    written = [row.seconds for row in rows if isinstance(row, Point)]
    assert written[:full] == [*range(1, full + 1)]
    assert all(after - before >= after / spacing for before, after in itertools.pairwise(written[full - 1 :]))


def test_the_last_points_are_written_at_the_end(tmp_path: Path) -> None:
    run = journal(tmp_path)
    run.record([Start(1, 0), *steps(*range(1, 2001))])
    run.record([Point("score", 2001, 7.0, 2000.1)])
    assert saved(run).last["score"].step < 2001
    run.finish()
    assert saved(run).last["score"].value == 7.0
    size = run.size
    run.finish()
    journal(tmp_path).finish()  # nor by a rank 0 that comes later
    assert saved(run).last["score"].step == 2001
    assert run.size == size


def test_a_long_curve_keeps_its_ends_and_its_newest_point() -> None:
    points = [Point("score", step, 1 / 3, step / 10) for step in range(1, 5001)]
    newest = Point("score", 5003, 7.0, 501.0)
    thinned = history.thin(points, newest)
    assert len(thinned) == history.MAX_SHOWN + 1
    assert [point[0] for point in thinned[:1] + thinned[-2:]] == [1, 5000, 5003]
    assert thinned[0][2] == 0.333333
    assert history.thin(points[:2], points[1]) == [[1, 0.1, 0.333333], [2, 0.2, 0.333333]]


def test_the_rate_is_of_training_alone() -> None:
    run = journal()
    assert run.history.per_second() is None
    run.record([Start(1, 0), *steps(1, 2, 3, name="done")])
    run.record([Start(2, 1), *steps(2, 3, name="done", at=100.0)])
    assert [(before.step, after.step) for before, after in run.history.spans()] == [(2, 3)]
    assert run.history.per_second() == 10.0


# ---- the file


@pytest.mark.parametrize("seed", range(20))
def test_a_history_is_read_as_it_was_recorded(tmp_path: Path, seed: int) -> None:
    chance, run, step = random.Random(seed), journal(tmp_path), 0
    for number in range(1, chance.randint(2, 12)):
        step = chance.randint(0, step)
        run.record([Start(number, step)])
        now = 0.0
        for _ in range(chance.randint(0, 40)):
            now += chance.choice([0.0, 0.0001, 0.3, 20.0])
            step += 1
            run.record([Point(chance.choice([*CURVES, "entropy"]), step, chance.random(), now)])
        if chance.random() < 0.7:
            run.happened("ended", number, chance.choice(["killed", "drained"]))
        run.record([Stall(chance.choice(get_args(What)), chance.random())])
        run.happened("stayed", number, count=chance.randint(0, 3))
        run.happened("joined", number, reason="observer_1-3", count=chance.randint(0, 3))
    run.finish()
    assert state(saved(run)) == state(run.history)


def test_joins_and_stays_are_counted() -> None:
    run = journal()
    run.happened("stayed", 1, count=0)
    run.happened("stayed", 2, count=2)
    run.happened("joined", 2, reason="observer_1-3", count=3)
    run.happened("joined", 2, reason="observer_4")
    read = run.history
    assert (read.joined, read.stayed, read.lost, read.ends) == (4, 2, {}, {})
    assert [(event.what, event.count, event.reason, event.cause) for event in read.events] == [
        ("stayed", 2, "", ""),
        ("joined", 3, "observer_1-3", ""),
        ("joined", 1, "observer_4", ""),
    ]


EARLIER = [
    '{"kind": "start", "generation": 1, "step": 0, "seconds": 0.0, "time": 5.0, "after": ""}',
    '{"kind": "score", "step": 1, "seconds": 1.0, "value": 2.0}',
    '{"kind": "low", "step": 1, "seconds": 1.0, "value": 1.0}',
    '{"kind": "high", "step": 1, "seconds": 1.0, "value": 3.0}',
    '{"kind": "lost", "cause": "killed"}',
    '{"kind": "event", "what": "lost", "generation": 1, "time": 5.0, "cause": "killed", "reason": "x"}',
]


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / rundir.HISTORY).write_text("\n".join(EARLIER) + "\n")
    read = history.read(tmp_path)
    assert read.lost == {"killed": 1}
    assert [(low.value, high.value) for low, high in read.spread()] == [(1.0, 3.0)]
    assert read.last["score"] == Point("score", 1, 2.0, 1.0, 0.0)
    assert read.events == [Event("lost", 1, "killed", "x", time=5.0)]


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = journal(tmp_path)
    interrupt(run)
    asyncio.run(run.save())
    whole = run.path.read_bytes()
    *rows, last = whole.splitlines(keepends=True)
    run.path.write_bytes(b"".join(rows))
    expected = state(history.read(tmp_path))
    for cut in range(1, len(last)):
        run.path.write_bytes(whole[:-cut])
        assert state(history.read(tmp_path)) == expected


KINDS = [b'{"kind": []}', b'{"kind": "x"}', b'{"kind": "score"}', b'{"kind": "start"}']
TEXT_FOR_STEP = b'{"kind": "point", "name": "score", "step": "x", "seconds": 1, "value": 1}'
INFINITE = b'{"kind": "point", "name": "score", "step": 5, "seconds": 1, "value": 1e999}'


@pytest.mark.parametrize(
    "line", [b"", b"\x00" * 40, b"\xff\xfe", b"7", b"[]", b"{}", *KINDS, TEXT_FOR_STEP, INFINITE, b"[" * 100_000]
)
def test_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    run = journal(tmp_path)
    interrupt(run)
    expected = state(saved(run))
    with run.path.open("ab") as file:
        file.write(line + b"\n")
    assert state(history.read(tmp_path)) == expected


def test_a_journal_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.record([Start(1, 0), *steps(1, 2)])
    asyncio.run(first.save())
    first.path.write_bytes(first.path.read_bytes() + b'{"kind": "poi')
    second = journal(tmp_path)
    second.record([Start(2, 1), *steps(2, 3)])
    asyncio.run(second.save())
    second.record(steps(4, at=3.0))
    assert state(saved(second)) == state(second.history)
    assert [step for step, _ in shown(second.history)] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in second.path.read_text().splitlines())


def test_failed_write_is_logged_once_and_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    run = journal(directory)
    run.path.mkdir()  # as good as a full disk, for root too
    run.record([Start(1, 0)])
    for step in range(1, 4):
        run.record(steps(step, at=step))
        assert not asyncio.run(run.save())
    assert capsys.readouterr().out.count("history cannot be written") == 1
    run.path.rmdir()
    run.record(steps(4, at=4.0))
    assert [step for step, _ in shown(saved(run))] == [1, 2, 3, 4]
    assert [path.name for path in directory.iterdir()] == [rundir.HISTORY]


@pytest.mark.parametrize("begun", [False, True])
def test_a_save_that_is_cancelled_loses_no_row_and_writes_none_twice(tmp_path: Path, begun: bool) -> None:
    """Whether the disk, which hangs, has begun with it or not."""

    class Hanging(Journal):
        def _write(self) -> None:
            started.set()
            goes_on.wait()
            super()._write()

    async def cancel() -> None:
        if not begun:
            hang = asyncio.create_task(disk.run(goes_on.wait))
        saving = asyncio.create_task(run.save())
        await (asyncio.to_thread(started.wait) if begun else asyncio.sleep(0.01))
        saving.cancel()
        await asyncio.wait({saving})
        run.record(steps(2))
        saving = asyncio.create_task(run.save())
        await asyncio.sleep(0.01)
        goes_on.set()
        assert await saving
        if not begun:
            await hang

    started, goes_on, disk = threading.Event(), threading.Event(), Disk()
    run = Hanging(tmp_path, disk, print)
    run.record([Start(1, 0), *steps(1)])
    asyncio.run(cancel())
    assert [type(row) for row in history.read_rows(run.path)[0]] == [Start, Point, Point]


def test_a_file_that_cannot_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = journal(tmp_path)
    first.record([Start(1, 0), *steps(1, 2)])
    before = saved(first)

    def fail(path: Path, offset: int = 0) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(history, "read_rows", fail)
        second = journal(tmp_path)
        second.record([Start(2, 2), *steps(3)])
        assert not asyncio.run(second.save())
    assert state(history.read(tmp_path)) == state(before)
    assert saved(second).last["score"].step == 3
    assert [row.step for row in history.read_rows(second.path)[0] if isinstance(row, Point)] == [1, 2, 3]


# ---- as the tools of others read it


def examples(language: str) -> list[str]:
    """The examples of docs/watch.md in `language`."""
    blocks = (Path(__file__).resolve().parents[2] / "docs" / "watch.md").read_text().split("```")
    return [each.removeprefix(f"{language}\n") for each in blocks[1::2] if each.startswith(f"{language}\n")]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has a run's files."""
    run = journal(tmp_path)
    interrupt(run)
    asyncio.run(run.save())
    calls = [{"name": "hits", "cat": "client", "dur": dur, "args": {"to": "sampler_0"}} for dur in (1000.0, 3000.0)]
    (tmp_path / "trace").mkdir()
    other = {"name": "step", "cat": "internal", "dur": 9.0, "args": {"step": 1}}
    (tmp_path / "trace" / "trace.json").write_text(json.dumps({"traceEvents": [other, *calls], "metadata": {}}))
    monkeypatch.chdir(tmp_path)


CURVE = [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
ENDED = [(1, "crashed", "")]


@pytest.mark.usefixtures("beside")
def test_pandas_reads_it() -> None:
    scope = dict[str, Any]()
    exec("".join(examples("python")), scope)
    assert [*scope["curve"].items()] == CURVE
    assert [*scope["ended"].itertuples(index=False)] == ENDED
    assert [*scope["slow"].itertuples()] == [(("hits", "sampler_0"), 2, 4000.0, 3000.0)]


@pytest.mark.usefixtures("beside")
def test_duckdb_reads_it() -> None:
    import duckdb

    curve, ended, slow = (duckdb.sql(example).fetchall() for example in examples("sql"))
    assert (curve, ended) == (CURVE, ENDED)
    assert slow == [("hits", "sampler_0", 2, 0.004, 3.0)]
