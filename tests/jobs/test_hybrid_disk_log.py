"""The log in which a table past memory lies: what is read is what was written last, wherever it has moved to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.hybrid import disk_io, disk_log
from rolecall.jobs.hybrid.disk_io import DEPTH, KernelReads, ThreadReads
from rolecall.jobs.hybrid.disk_log import LogStore
from rolecall.jobs.hybrid.disk_rows import HotRows

ROWS, WIDTH = 3000, 3


@pytest.fixture(params=["direct", "threads", "page cache"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the file is read and written: as other disks, kernels and file systems have it."""
    if request.param == "threads":
        monkeypatch.setattr(disk_io, "CALLS", {})
    elif request.param == "page cache":
        monkeypatch.setattr(disk_log, "_open_directly", lambda file: None)
    return str(request.param)


@pytest.fixture
def hot(tmp_path: Path, way: str) -> Iterator[HotRows]:
    """Its segments are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_log, "LEAST_BLOCKS", 2)
        each = HotRows(LogStore(tmp_path, ROWS, WIDTH), 200)
    yield each
    each.close()


def values_of(rows: Tensor, turn: int = 0) -> Tensor:
    return rows[:, None] + torch.tensor([0.0, 0.25, 0.5]) + 10_000 * turn


def test_rows_that_change_again_and_again_are_what_they_were_set_to(hot: HotRows) -> None:
    """Segments are written several times, most of them while other rows of them still count."""
    generator = torch.Generator().manual_seed(1)
    expected = values_of(torch.arange(ROWS))
    hot.set(torch.arange(ROWS), expected)
    for turn in range(1, 120):
        rows = torch.randperm(ROWS // 4, generator=generator)[:90]  # some, so that the others have to move
        rows = torch.cat([rows, torch.randint(ROWS // 4, ROWS, (10,), generator=generator).unique()])
        with hot.holding(rows) as slots:
            assert torch.equal(hot.values[slots], expected[rows])
            if turn % 3:  # else they are only looked up
                hot.changed[slots] = True
                hot.values[slots] = expected[rows] = values_of(rows, turn)
        if not turn % 10:
            assert torch.equal(hot.fetch(torch.arange(ROWS)), expected)
    assert int(hot.store.uses.sum()) > 2 * hot.store.segments
    assert torch.equal(hot.fetch(torch.arange(ROWS)), expected)


def test_by_place_has_all_rows_on_disk_once(hot: HotRows) -> None:
    hot.set(torch.arange(ROWS), values_of(torch.arange(ROWS)))
    hot.set(torch.arange(0, ROWS, 7), values_of(torch.arange(0, ROWS, 7)))
    with hot.holding(torch.arange(5)):
        parts = list(hot.by_place())
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(5, ROWS))
    together = [rows for rows in parts if len(rows)]
    assert len(together) <= hot.store.segments


def test_a_record_that_is_overwritten_while_it_is_read_is_read_again(
    hot: HotRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot.set(torch.arange(ROWS), values_of(torch.arange(ROWS)))
    read, rows, turns = hot.store.read, torch.arange(5), [1]

    def read_late(places: Tensor) -> Tensor:
        monkeypatch.setattr(hot.store, "read", read)
        segment = int(hot.store.segment_of(places[:1]))
        uses = int(hot.store.uses[segment])
        with hot._writing:
            hot._reclaim(segment)  # they move
        while int(hot.store.uses[segment]) == uses:  # others are written where they were
            hot.set(torch.arange(5, ROWS), values_of(torch.arange(5, ROWS), turns[-1]))
            turns.append(turns[-1] + 1)
        return read(places)

    monkeypatch.setattr(hot.store, "read", read_late)
    assert torch.equal(hot.fetch(rows), values_of(rows))
    assert len(turns) > 1


def test_a_row_that_moves_while_it_comes_into_memory_is_forgotten_there(hot: HotRows) -> None:
    """What it has on disk is then counted where it is, and freed with its slot."""
    hot.set(torch.arange(ROWS), values_of(torch.arange(ROWS)))
    take = hot._take

    def take_late(count: int) -> Tensor:
        hot._lock.release()  # as it does where it waits for a slot
        with hot._writing:
            hot._reclaim(int(hot.store.segment_of(-1 - hot._slots[:1])))
        hot._lock.acquire()
        return take(count)

    before = hot._slots[:5].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "_take", take_late)
        hot.bring(torch.arange(5))
    with hot.holding(torch.arange(5)) as slots:
        assert torch.equal(hot.values[slots], values_of(torch.arange(5)))
        assert not torch.equal(-1 - hot._places[slots], before), "they have moved"
    for begin in range(5, 2000, 100):
        hot.bring(torch.arange(begin, begin + 100))
    assert torch.equal(hot.fetch(torch.arange(5)), values_of(torch.arange(5)))


def test_a_row_that_was_never_set_is_no_row(hot: HotRows) -> None:
    hot.set(torch.arange(10), values_of(torch.arange(10)))
    with pytest.raises(RuntimeError, match="looked up before they are set"):
        hot.fetch(torch.tensor([9, 10]))


def test_more_rows_than_places_have_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"NUM_EMBEDDINGS: 1500000000 rows of a server .* set more SERVERS"):
        LogStore(tmp_path, 1_500_000_000, 1)


@pytest.mark.parametrize(
    ("width", "stride"),
    [(1, 4), (5, 32), (64, 256), (100, 512), (129, 1024), (1000, 4096), (1025, 8192)],
)
def test_a_record_touches_no_more_blocks_than_it_needs(tmp_path: Path, width: int, stride: int) -> None:
    store = LogStore(tmp_path, 600, width)
    assert store.stride == stride
    assert list(tmp_path.iterdir()) == [], "it has no name"
    records = torch.randn(600, width)
    places = store.append(torch.arange(600), records)
    order = torch.randperm(600)
    assert len(order) > 2 * DEPTH
    assert torch.equal(store.read(places[order]), records[order]), "segments as a whole"
    assert torch.equal(store._read_each(places[order]), records[order])
    store.close()


# ---- what a disk does wrong


@pytest.fixture
def data(tmp_path: Path) -> Iterator[int]:
    """A file of 8 blocks, opened directly where that is possible."""
    path = tmp_path / "data"
    path.write_bytes(np.arange(8 * 4096 // 4, dtype=np.int32).tobytes())
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("a file system without direct reads")
    yield file
    os.close(file)


@pytest.mark.parametrize("kind", [KernelReads, ThreadReads])
def test_reads_are_of_their_offsets(kind: Any, data: int) -> None:
    reads = kind(data, 4096)
    for offsets in ([], [3], [7, 0, 0, 5], [1, 2] * (DEPTH // 2)):
        pieces = reads.read(4096 * np.array(offsets, dtype=np.int64)).view(torch.int32)
        assert pieces[:, 0].tolist() == [1024 * offset for offset in offsets]
        assert pieces[:, -1].tolist() == [1024 * offset + 1023 for offset in offsets]
    reads.close()


@pytest.mark.parametrize("kind", [KernelReads, ThreadReads])
def test_what_cannot_be_read_is_an_error_that_names_the_setting(kind: Any, data: int) -> None:
    reads = kind(data, 4096)
    with pytest.raises(OSError, match="TABLE_DIR: rows cannot be read"):
        reads.read(4096 * np.array([2, 8], dtype=np.int64))  # behind its end
    assert int(reads.read(np.array([4096])).view(torch.int32)[0, 0]) == 1024, "another place can be read"
    reads.close()


def test_what_cannot_be_written_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LogStore(tmp_path, 10, 2)
    full = MagicMock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(disk_io.os, "pwritev", full)
    with pytest.raises(OSError, match=r"TABLE_DIR: rows cannot be written \(No space left on device\)"):
        store.append(torch.arange(10), torch.ones(10, 2))


def test_threads_that_read_late_change_no_later_pieces(data: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a read that has failed."""
    read, begun, late, ended = disk_io.read_fully, threading.Event(), threading.Event(), threading.Event()

    def read_late(file: int, memory: Tensor, offset: int) -> None:
        if offset == 4096:
            begun.wait(60)
            raise OSError(errno.EIO, "broken")
        if offset == 0:
            begun.set()
            late.wait(60)
        read(file, memory, offset)
        if offset == 0:
            ended.set()

    monkeypatch.setattr(disk_io, "read_fully", read_late)
    reads = ThreadReads(data, 4096)
    with pytest.raises(OSError, match="broken"):
        reads.read(4096 * np.array([1, 0]))
    pieces = reads.read(4096 * np.array([2, 3])).view(torch.int32)
    late.set()
    assert ended.wait(60)
    assert pieces[:, 0].tolist() == [2048, 3072]
    reads.close()


def test_a_disk_that_hangs_is_named_and_its_memory_not_used_again(data: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_io, "WAIT", 0.0)
    reads = KernelReads(data, 4096)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="TABLE_DIR: no row was read for 0 s; is its disk hanging"):
            reads.read(np.zeros(1, dtype=np.int64))


def test_threads_that_hang_are_replaced(data: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, hanging = ThreadReads(data, 4096), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(disk_io, "WAIT", 0.05)
        patch.setattr(disk_io, "read_fully", lambda *args: hanging.wait(60))
        with pytest.raises(TimeoutError, match=r"no row was read for 0.05 s; is its disk hanging"):
            reads.read(np.zeros(disk_io.THREADS, dtype=np.int64))
    monkeypatch.setattr(disk_io, "WAIT", 5.0)
    assert int(reads.read(np.array([4096])).view(torch.int32)[0, 0]) == 1024
    hanging.set()
    reads.close()


def test_a_read_that_waits_for_others_in_vain_names_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_log, "PATIENCE", 0.05)
    store = LogStore(tmp_path, 10, 2)
    busy = [store._readers.get() for _ in range(disk_log.READERS)]
    with pytest.raises(TimeoutError, match=r"TABLE_DIR: no row was read for 0.05 s; is its disk hanging"):
        store._read_each(torch.arange(1))
    for reads in busy:
        store._readers.put(reads)
    store.close()


def test_forbidden_kernel_reads_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelReads, "_checked", MagicMock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    with structlog.testing.capture_logs() as lines:
        store = LogStore(tmp_path, 10, 2)
    if store._direct is None:
        pytest.skip("a file system without direct reads")
    assert "not permitted" in lines[0]["reason"]
    places = store.append(torch.arange(10), torch.ones(10, 2))
    assert store.read(places).all()
    store.close()
