"""From the files of ranks to rank 0's folder: chunks, later generations, requests, and what is deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolecall.gang.protocol import Key
from rolecall.messages.queries import Cursor, ReadSpans, Spans
from rolecall.messages.worker import RecordTrace
from rolecall.rank import collecting, tracing
from rolecall.rank.collecting import Collector
from rolecall.rank.tracing import Recordings
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.span_file import file_name

PS: Key = ("ps", 0)
LEAD: Key = ("lead", 0)


class Worker:
    """A worker process, of which only what it is told is known."""

    def __init__(self, generation: int, traced: bool = True) -> None:
        self.state, self.alive, self.traced, self.generation, self.join = "running", True, traced, generation, 0
        self.task = SimpleNamespace(check=False)
        self.sent: list[RecordTrace] = []

    def send(self, message: RecordTrace) -> None:
        self.sent.append(message)


class Rank:
    """A rank's folder, with the replies of its supervisor."""

    def __init__(self, directory: Path, key: Key = PS) -> None:
        directory.mkdir()
        self.directory, self.key = directory, key
        self.worker: Worker | None = None
        self.recordings = Recordings(directory, lambda: cast(WorkerProcess | None, self.worker))

    def begin(self, generation: int, join: int = 0) -> Path:
        """A worker's file."""
        path = self.directory / file_name(generation, join)
        process = {"job": "job", "role": self.key[0], "ordinal": self.key[1], "rank": 1, "generation": generation}
        process["join"] = join
        path.write_text(json.dumps(["process", process]) + "\n")
        return path

    def add(self, path: Path, *names: str) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(["span", name]) + "\n" for name in names)

    async def ask(self, question: ReadSpans) -> dict[Key, Any]:
        spans = self.recordings.spans(Cursor(question.file, question.offset), question.collect)
        return {self.key: asdict(spans)}


async def disk(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def collector(folder: Path, *ranks: Rank, over: bool = False) -> Collector:
    async def ask(question: ReadSpans, *, to: Collection[Key], timeout: float) -> dict[Key, Any]:
        (rank,) = (rank for rank in ranks if [rank.key] == to)
        return await rank.ask(question)

    return Collector(folder, lambda: [rank.key for rank in ranks], ask, disk, lambda: over)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "ps")


def test_what_a_rank_records_is_copied_and_what_was_copied_is_deleted(rank: Rank, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    rank.worker = Worker(1)
    here = collector(folder, rank)

    async def steps() -> None:
        assert not await here.collect()
        assert not folder.exists()
        first = rank.begin(1)
        rank.add(first, "a", "b")
        with first.open("a") as file:
            file.write('["span", "half')
        assert not await here.collect()
        copy = folder / "ps_0-1.jsonl"
        assert copy.read_text() == first.read_text().removesuffix('["span", "half')
        with first.open("a") as file:
            file.write('"]\n')
        rank.worker = Worker(2)
        second = rank.begin(2)
        rank.add(second, "c")
        assert not await here.collect()
        assert copy.read_text() == first.read_text()
        assert (folder / "ps_0-2.jsonl").read_text() == second.read_text()
        await here.collect()
        assert not first.exists()
        assert second.exists()

    asyncio.run(steps())


def test_a_worker_that_joins_again_has_a_copy_of_its_own(rank: Rank, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    first, again = rank.begin(1), rank.begin(1, join=2)
    rank.add(first, "a")
    rank.add(again, "b")
    text = first.read_text()
    asyncio.run(collector(folder, rank).collect())
    assert (folder / "ps_0-1.jsonl").read_text() == text
    assert (folder / "ps_0-1-2.jsonl").read_text() == again.read_text()
    rank.add(again, "c")
    asyncio.run(collector(folder, rank).collect())  # rank 0 was started again
    assert (folder / "ps_0-1-2.jsonl").read_text() == again.read_text()


def test_a_large_file_comes_in_chunks(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_DATA_BYTES", 200)
    path, rank.worker = rank.begin(1), Worker(1)
    rank.add(path, *("x" * number for number in range(50)))
    asyncio.run(collector(tmp_path / "trace", rank).collect())
    assert (tmp_path / "trace" / "ps_0-1.jsonl").read_text() == path.read_text()


def test_a_restarted_rank_0_goes_on_where_it_stopped(rank: Rank, tmp_path: Path) -> None:
    folder, path, rank.worker = tmp_path / "trace", rank.begin(3), Worker(3)
    rank.add(path, "a")
    asyncio.run(collector(folder, rank).collect())
    rank.add(path, "b")
    asyncio.run(collector(folder, rank).collect())
    assert (folder / "ps_0-3.jsonl").read_text() == path.read_text()


def test_a_disk_that_fails_halfway_leaves_no_half(rank: Rank, tmp_path: Path) -> None:
    folder, path, rank.worker = tmp_path / "trace", rank.begin(1), Worker(1)
    here = collector(folder, rank)
    rank.add(path, "a")
    here.disk = fail = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    asyncio.run(here.collect())
    assert fail
    assert not folder.exists()
    here.disk = disk
    asyncio.run(here.collect())
    with (folder / "ps_0-1.jsonl").open("a") as file:
        file.write('["span", "torn')
    rank.add(path, "b")
    asyncio.run(here.collect())
    assert (folder / "ps_0-1.jsonl").read_text() == path.read_text()


def test_at_the_end_ranks_hand_over_what_they_have(rank: Rank, tmp_path: Path) -> None:
    folder, path, rank.worker = tmp_path / "trace", rank.begin(1), Worker(1)
    lead = Rank(tmp_path / "lead", LEAD)
    lead.begin(1)
    here = collector(folder, rank, lead, over=True)

    async def steps() -> None:
        await here.collect()
        assert rank.worker
        rank.add(path, "the last one")
        rank.worker.alive = False
        waiting = asyncio.create_task(rank.recordings.hand_over())
        await asyncio.sleep(0)
        assert not waiting.done()
        await here.finish()
        await asyncio.wait_for(waiting, 10)
        assert (folder / "ps_0-1.jsonl").read_text() == path.read_text()
        rank.recordings = lead.recordings = cast(Recordings, None)  # it has ended, and is not asked again
        assert await here.collect()

    asyncio.run(asyncio.wait_for(steps(), 30))


# ---- requests


def cursor(spans: Spans) -> Cursor:
    return Cursor(spans.file, spans.next)


def test_a_request_begins_where_the_workers_file_ends(rank: Rank) -> None:
    async def steps() -> None:
        rank.worker = worker = Worker(4, traced=False)
        reply = rank.recordings.start(10)
        assert reply == Cursor(file_name(4))
        assert worker.sent == [RecordTrace(rank.directory / file_name(4), 10)]
        path = rank.begin(4)
        rank.add(path, "a")
        spans = rank.recordings.spans(reply)
        assert (spans.data, spans.more, spans.ended) == (path.read_text(), False, False)
        assert spans.process["generation"] == 4
        assert rank.recordings.spans(cursor(spans)).data == ""
        longer = rank.recordings.start(20)
        assert longer == Cursor(path.name, path.stat().st_size)
        rank.add(path, "b")
        assert rank.recordings.spans(longer).data == '["span", "b"]\n'
        # a generation that begins meanwhile is recorded too
        rank.worker = Worker(5, traced=False)
        rank.recordings.spans(cursor(spans))
        assert [sent.path for sent in rank.worker.sent] == [rank.directory / file_name(5)]
        rank.add(rank.begin(5), "c")
        spans = rank.recordings.spans(Cursor(path.name, path.stat().st_size))
        assert (spans.file, spans.offset) == (file_name(5), 0)

    asyncio.run(steps())


def test_a_rank_whose_own_setting_is_off_records_for_rank_0_that_collects(rank: Rank, tmp_path: Path) -> None:
    rank.worker = Worker(4, traced=False)
    here = collector(tmp_path / "trace", rank)
    for _ in range(2):
        asyncio.run(here.collect())
    assert rank.worker.sent == [RecordTrace(rank.directory / file_name(4), None)]


def test_a_request_before_the_first_worker_and_one_that_is_wrong(rank: Rank) -> None:
    reply = rank.recordings.start(10)
    assert rank.recordings.spans(reply).data == ""
    rank.worker = Worker(1, traced=False)
    rank.recordings.spans(reply)
    assert rank.worker.sent[0].path == rank.directory / file_name(1)
    for seconds in (0, -1, 1e9, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            rank.recordings.start(seconds)


def test_some_members_are_asked_at_a_time(tmp_path: Path) -> None:
    asked, most = 0, 0

    async def ask(question: ReadSpans, *, to: Any, timeout: float) -> dict[Key, Any]:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0)
        asked -= 1
        return {to[0]: {"error": "no spans"}}

    keys = [("ps", number) for number in range(3 * collecting.MAX_PENDING_QUERIES)]
    assert not asyncio.run(Collector(tmp_path, lambda: keys, ask, disk, lambda: False).collect())
    assert most == collecting.MAX_PENDING_QUERIES
