"""From the files of ranks to the copies of rank 0 or of `rolecall trace`: what is copied, and when a rank may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolecall.gang.protocol import Key
from rolecall.messages.queries import ReadTrace
from rolecall.messages.worker import RecordTrace
from rolecall.observe.trace.copies import TraceCopies
from rolecall.observe.trace.otlp import Exporter
from rolecall.rank import collecting, tracing
from rolecall.rank.collecting import Collector
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.tracing import Recordings
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record import records
from rolecall.record.records import Beginning, SpanRecord, file_name, line
from tests.observe.traces import Worker as Traced

PS: Key = ("ps", 0)


class Worker:
    """A worker process, of which only what it is told is known."""

    def __init__(self, generation: int, traced: bool = True) -> None:
        self.state, self.alive, self.traced, self.generation, self.join = "running", True, traced, generation, 0
        self.check, self.life = False, self
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
        path.write_bytes(line(Beginning(Traced("ps", generation=generation).process)))
        return path

    def reply(self, have: dict[str, int], collect: bool = False) -> dict[str, Any]:
        return asdict(self.recordings.read(have, collect))


def add(path: Path, *names: str) -> None:
    with path.open("ab") as file:
        file.writelines(map(span, names))


def span(name: str) -> bytes:
    return line(SpanRecord(name, "", name, "internal", 1, 2, 3, {}))


def text(path: Path) -> str:
    """What a copy has of a rank's file: all but rank 0's readings of the clock."""
    return "".join(each for each in path.read_text().splitlines(keepends=True) if not each.startswith('["clock"'))


class Gang:
    """What a collector needs of rank 0's coordinator, for these ranks."""

    def __init__(self, folder: Path, *ranks: Rank) -> None:
        self.ranks = {rank.key: rank for rank in ranks}
        self.settings = SimpleNamespace(checkpoint_dir=folder)
        self.gang = SimpleNamespace(members=self.ranks, state="running")
        self.queries, self.files = SimpleNamespace(ask=self.ask), SimpleNamespace(disk=SimpleNamespace(run=self.run))
        self.folder = folder / records.FOLDER

    async def ask(self, question: ReadTrace, *, to: Collection[Key], timeout: float) -> dict[Key, Any]:
        await asyncio.sleep(0)
        return {key: self.ranks[key].reply(question.have, question.collect) for key in to}

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def collector(self, exporter: Exporter | None = None) -> Collector:
        return Collector(cast(Coordinator, self), lambda: exporter)

    def collect(self) -> None:
        asyncio.run(self.collector().collect())


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "ps")


def test_what_a_rank_records_is_copied_as_it_grows(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_DATA_BYTES", 200)  # of one reply
    gang = Gang(tmp_path, rank)
    here = gang.collector()

    async def steps() -> None:
        rank.worker = Worker(1)
        assert not await here.collect()
        assert not gang.folder.exists()
        first = rank.begin(1)
        add(first, *map(str, range(50)))
        whole = first.read_text()
        with first.open("a") as file:
            file.write('["span","half')
        await here.collect()
        assert text(gang.folder / "ps_0-1.jsonl") == whole
        with first.open("a") as file:
            file.write('"]\n')
        rank.worker = Worker(2)
        again = rank.begin(1, join=2)
        add(again, "joined again")
        add(rank.begin(2), "c")
        await here.collect()
        assert text(gang.folder / "ps_0-1.jsonl") == first.read_text()
        assert text(gang.folder / "ps_0-1-2.jsonl") == again.read_text()
        assert len(text(gang.folder / "ps_0-2.jsonl").splitlines()) == 2

    asyncio.run(steps())


def test_a_restarted_rank_0_and_one_whose_disk_was_full_copy_files_again(rank: Rank, tmp_path: Path) -> None:
    gang, path, rank.worker = Gang(tmp_path, rank), rank.begin(3), Worker(3)
    add(path, "a")
    gang.collect()
    add(path, "b")
    gang.collect()
    assert text(gang.folder / "ps_0-3.jsonl") == path.read_text()
    copies = TraceCopies(gang.folder, "ps_0")
    copies.add(rank.reply({}))
    add(path, "c")
    copies.folder = tmp_path / "no folder" / "below"
    with pytest.raises(FileNotFoundError):
        copies.add(rank.reply(copies.have))
    copies.folder = gang.folder
    (gang.folder / "ps_0-3.jsonl").write_text("half a wri")
    copies.add(rank.reply(copies.have))
    assert text(gang.folder / "ps_0-3.jsonl") == path.read_text()


class Sink:
    """In place of an exporter: notes what it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.closed = False

    def export_lines(self, first: str, lines: str) -> None:
        assert first.startswith('["process"')
        self.lines += lines.splitlines()[lines.startswith(first) :]

    def close(self) -> None:
        self.closed = True


def test_at_the_end_ranks_hand_over_what_they_have(rank: Rank, tmp_path: Path) -> None:
    rank.worker, lead, sink = Worker(1), Rank(tmp_path / "lead", ("lead", 0)), Sink()
    path, _ = rank.begin(1), lead.begin(1)
    gang = Gang(tmp_path, rank, lead)
    here = gang.collector(cast(Exporter, sink))

    async def steps() -> None:
        running = asyncio.create_task(here.run())
        assert rank.worker
        add(path, "the last one")
        rank.worker.alive = False
        waiting = asyncio.create_task(rank.recordings.hand_over())
        gang.gang.state = "finished"
        await asyncio.wait_for(waiting, 10)
        assert text(gang.folder / "ps_0-1.jsonl") == path.read_text()
        await here.close()
        rank.recordings = lead.recordings = cast(Recordings, None)  # they have ended, and are not asked again
        assert await here.collect()
        await running

    asyncio.run(asyncio.wait_for(steps(), 30))
    assert [each.encode() + b"\n" for each in sink.lines] == [span("the last one")]
    assert sink.closed


def test_a_rank_whose_setting_is_off_records_for_rank_0_that_collects(rank: Rank, tmp_path: Path) -> None:
    rank.worker = Worker(4, traced=False)
    for _ in range(2):
        Gang(tmp_path, rank).collect()
    assert rank.worker.sent == [RecordTrace(str(rank.directory / file_name(4)), None)]


def test_some_members_are_asked_at_a_time_and_one_that_cannot_reply_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, most, gang = 0, 0, Gang(tmp_path)

    async def ask(question: ReadTrace, *, to: Any, timeout: float) -> dict[Key, Any]:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0)
        asked -= 1
        return {to[0]: {"error": "no spans"}}

    monkeypatch.setattr(gang.queries, "ask", ask)
    gang.gang.members = [("ps", number) for number in range(3 * collecting.MAX_PENDING_QUERIES)]
    assert not asyncio.run(gang.collector().collect())
    assert most == collecting.MAX_PENDING_QUERIES


# ---- requests


def test_a_recording_begins_where_the_workers_file_ends(rank: Rank, tmp_path: Path) -> None:
    async def steps() -> None:
        assert rank.recordings.start(10) == {}  # before the first worker
        rank.worker = worker = Worker(4, traced=False)
        assert rank.reply({})["data"] == ""
        assert worker.sent[0].path == str(rank.directory / file_name(4))
        path = rank.begin(4)
        add(path, "a")
        size = path.stat().st_size
        have = rank.recordings.start(20)
        assert have == {path.name: size}
        assert worker.sent[1:] == [RecordTrace(str(path), 20)]
        add(path, "b")
        copies = TraceCopies(tmp_path / "copies", "ps_0", have)
        copies.add(rank.reply(copies.have))
        add(path, "c")
        copies.add(rank.reply(copies.have))
        process, *spans = text(tmp_path / "copies" / "ps_0-4.jsonl").splitlines(keepends=True)
        assert [each.encode() for each in spans] == [span("b"), span("c")]
        assert path.read_text().startswith(process)
        # a generation that begins meanwhile is recorded too
        rank.worker = Worker(5, traced=False)
        rank.reply(copies.have)
        assert [sent.path for sent in rank.worker.sent] == [str(rank.directory / file_name(5))]
        add(rank.begin(5), "d")
        reply = rank.reply(copies.have)
        assert (reply["file"], reply["offset"]) == (file_name(5), 0)

    asyncio.run(steps())
