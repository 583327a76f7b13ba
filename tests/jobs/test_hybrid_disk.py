"""Tables of `hybrid` past memory: what they compute, and their checkpoints of a base and logs."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolecall import UsageError, config
from rolecall.checkpoint import checkpoint, logged, shardfile
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.shardfile import ShardError
from rolecall.checkpoint.shards import Written
from rolecall.jobs.hybrid import HybridSettings, disk_rows
from rolecall.jobs.hybrid.disk import DiskTable
from rolecall.jobs.hybrid.disk_log import LogStore
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.table import Bags, Table
from tests.jobs.test_hybrid_sharded import make_step, together

ROWS, WIDTH, HOT = 300, 3, 16
Tables = list[tuple[Tensor, Tensor]]  # of all servers: weights and Adagrad's squares


def chosen(**changes: Any) -> HybridSettings:
    return HybridSettings(num_embeddings=ROWS, embedding_dim=WIDTH, lr=0.5, **changes)


def on_disk(options: HybridSettings, ordinal: int, directory: Path, hot: int = HOT) -> DiskTable:
    return DiskTable(options.model_copy(update={"table_dir": directory}), ordinal, hot)


def bags_of(generator: torch.Generator, rows: int, most: int) -> Bags:
    """Three bags, one of them perhaps empty, of at most `most` rows, some of which come several times."""
    lengths = torch.randint(most // 3 + 1, (3,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    return Bags(torch.randint(rows, (count,), generator=generator), offsets, torch.rand(count, generator=generator))


# ---- what it computes


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["adagrad", "sgd"]),
    st.sampled_from([2, 9, 16, 299]),
    st.lists(st.tuples(st.sampled_from(["pool", "update", "prefetch", "fetch"]), st.integers(1, 60)), max_size=30),
)
def test_it_is_the_table_in_memory_bit_by_bit(seed: int, optimizer: str, hot: int, ops: list[tuple[str, int]]) -> None:
    """Also where a step's rows are more than the memory holds."""
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        options = chosen(optimizer=optimizer)
        table, expected = on_disk(options, 0, Path(directory), hot), Table(options, 0)
        table.hot._clock = 2**31 - 3  # weeks of training
        try:
            table.fill()
            expected.fill()
            for op, size in ops:
                rows = torch.randperm(ROWS, generator=generator)[:size].sort().values
                if op == "pool":
                    bags = bags_of(generator, ROWS, size)
                    assert torch.equal(table(bags), expected(bags))
                elif op == "update":
                    gradient = torch.randn(size, WIDTH, generator=generator)
                    table.update(rows, gradient.clone())
                    expected.update(rows, gradient.clone())
                elif op == "prefetch":
                    table.prefetch(rows)
                else:
                    assert torch.equal(table.fetch(rows)["weight"], expected.weight[rows])
            assert torch.equal(table.fetch(torch.arange(ROWS))["weight"], expected.weight)
            assert torch.equal(table.squares, expected.squares)
        finally:
            table.close()


def test_rows_are_read_ahead_and_no_more_than_fit_stay(tmp_path: Path) -> None:
    table = on_disk(chosen(), 0, tmp_path)
    table.fill()
    table.prefetch(torch.arange(7))
    table._reader.submit(lambda: None).result(60)
    assert table.hot.read == 7
    bags = Bags(torch.arange(7), torch.tensor([0, 7]), None)
    table(bags)
    assert table.hot.read == 7, "they are there"
    for begin in range(0, ROWS, 8):
        table(Bags(torch.arange(begin, min(begin + 8, ROWS)), torch.tensor([0, min(8, ROWS - begin)]), None))
    table(bags)
    assert table.hot.read > ROWS - HOT
    assert table.hot.written == 0, "nothing has changed"
    table.close()


def test_what_is_read_at_once_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_rows, "BATCH_BYTES", 2**15)
    store = LogStore(tmp_path, 40, 2048)
    hot, read, asked = disk_rows.HotRows(store, 40), store.read, list[int]()
    hot.set(torch.arange(40), torch.arange(40.0)[:, None].expand(-1, 2048))
    monkeypatch.setattr(store, "read", lambda rows: asked.append(len(rows)) or read(rows))
    with hot.holding(torch.arange(19)) as slots:
        assert torch.equal(hot.values[slots][:, 7], torch.arange(19.0))
    assert asked == [4, 4, 4, 4, 3]
    hot.close()


def test_a_lookup_copies_no_more_rows_than_fit_or_one_bag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table, expected = on_disk(chosen(), 0, tmp_path), Table(chosen(), 0)
    table.fill()
    expected.fill()
    fetch, copied = table.hot.fetch, list[int]()
    monkeypatch.setattr(table.hot, "fetch", lambda rows: copied.append(len(rows)) or fetch(rows))
    bags = Bags(torch.arange(0, 52, 2), torch.tensor([0, 3, 6, 6, 9, 20, 22, 26]), torch.rand(26))
    assert torch.equal(table(bags), expected(bags))
    assert copied == [6, 3, 11, 6]
    table.close()


def test_an_index_out_of_range_is_named(tmp_path: Path) -> None:
    table = on_disk(chosen(servers=3), 1, tmp_path)
    for row in (-1, 100):
        with pytest.raises(IndexError, match=rf"index {row * 3 + 1} is out of range: NUM_EMBEDDINGS={ROWS}"):
            table(Bags(torch.tensor([row]), torch.tensor([0, 1]), None))
        with pytest.raises(IndexError, match="is out of range"):
            table.update(torch.tensor([row]), torch.ones(1, WIDTH))
    table.close()


def test_a_disk_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_rows, "WAIT", 0.05)
    table = on_disk(chosen(), 0, tmp_path, 4)
    table.fill()
    hanging = threading.Event()
    monkeypatch.setattr(table.hot, "_clean", lambda: hanging.wait(60))
    for row in range(4):
        table(Bags(torch.tensor([row]), torch.tensor([0, 1]), None))
    with pytest.raises(TimeoutError, match=r"TABLE_DIR: .* is its disk hanging"):
        table(Bags(torch.tensor([4]), torch.tensor([0, 1]), None))
    hanging.set()
    table.close()


def test_error_of_freeing_a_slot_reaches_the_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = on_disk(chosen(), 0, tmp_path, 4)
    table.fill()
    monkeypatch.setattr(table.hot.store, "append", MagicMock(side_effect=OSError(errno.EIO, "broken")))
    for row in range(4):
        table.update(torch.tensor([row]), torch.ones(1, WIDTH))
    with pytest.raises(OSError, match="broken"):
        table.update(torch.tensor([4]), torch.ones(1, WIDTH))
    table.close()


# ---- settings


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = chosen(table_dir=tmp_path / "rows", table_memory=200_000).model_copy(update={"num_embeddings": 10_000})
    monkeypatch.setattr(os, "posix_fallocate", MagicMock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UsageError, match=r"TABLE_DIR=.*rows: the \d+ bytes of .*No space left on device"):
        DiskTable(options, 0)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"TABLE_DIR=.*file"):
        DiskTable(options.model_copy(update={"table_dir": tmp_path / "file"}), 0)


def test_table_memory_is_in_bytes_and_decides_what_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_EMBEDDINGS": "1000000", "TABLE_MEMORY": "100MB"}.items():
        monkeypatch.setenv(name, value)
    options = config.load(HybridSettings)
    assert options.hot_rows == (100_000_000 - 9 * 1_000_000) // (64 * 4 + 21)
    assert not options.model_copy(update={"servers": 4}).hot_rows, "it fits"
    monkeypatch.setenv("TABLE_MEMORY", "9MB")
    with pytest.raises(UsageError, match="TABLE_MEMORY=9000000: must be at least 9283648 bytes for 1000000 rows"):
        config.load(HybridSettings)
    monkeypatch.setenv("NUM_EMBEDDINGS", "100")
    monkeypatch.setenv("TABLE_MEMORY", "100kB")
    assert not config.load(HybridSettings).hot_rows, "it fits, though 1024 rows would not"
    monkeypatch.setenv("TABLE", "hashed")
    with pytest.raises(UsageError, match="TABLE_MEMORY goes with TABLE=fixed only"):
        config.load(HybridSettings)


# ---- checkpoints


class Gang:
    """A master and servers with tables on disk (`hot` rows in memory) or, where it is 0, in memory."""

    def __init__(
        self,
        directory: Path,
        servers: int = 2,
        hot: int = HOT,
        generation: int = 1,
        kept: Gang | None = None,
        **how: Any,
    ) -> None:
        def make(options: HybridSettings, ordinal: int) -> Table:
            return on_disk(options, ordinal, directory / "table", hot) if hot else Table(options, ordinal)

        served = {server.context.me.name: server for server in kept.servers} if kept else None
        self.table = together(
            directory,
            servers,
            generation,
            kept=served,
            make=make,
            num_embeddings=ROWS,
            lr=0.5,
            checkpoint_keep=3,
            **how,
        )
        self.master = self.table.context
        self.servers: list[TableServer] = list(self.master.group.transport.servers.values())
        self.step = self.master.restore({"embeddings": self.table, "step": 0})["step"]
        self.table.start(self.step)

    def train(self, steps: int = 1, rows: int = 12) -> None:
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            for server in self.servers:
                changing = torch.randperm(len(server.table.weight), generator=generator)[:rows].sort().values
                gradient = torch.randn(len(changing), WIDTH, generator=generator)
                make_step(server, Bags(changing, torch.arange(len(changing) + 1), None), gradient)

    def save(self, busy: bool = True) -> bool:
        """Writes a checkpoint, while it trains on."""
        self.master.save(self.step, {"embeddings": self.table, "step": self.step}, drain=False)
        if busy:
            self.train(3)
        return self.master.require_saver().wait(60)

    @property
    def tables(self) -> Tables:
        all_rows = [torch.arange(len(server.table.weight)) for server in self.servers]
        return [
            (
                server.table.fetch(rows)["weight"]
                if isinstance(server.table, DiskTable)
                else server.table.weight.detach().clone(),
                server.table.squares.clone(),
            )
            for server, rows in zip(self.servers, all_rows, strict=True)
        ]

    @property
    def whole(self) -> Tensor:
        whole = torch.full((ROWS, WIDTH + 1), -1.0)
        for number, (weight, squares) in enumerate(self.tables):
            whole[number :: len(self.servers)] = torch.cat([weight, squares[:, None]], 1)
        return whole


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made_here: list[Gang] = []

    def start(*args: Any, **changes: Any) -> Gang:
        made_here.append(Gang(tmp_path, *args, **changes))
        return made_here[-1]

    yield start
    tables = {server.table for each in made_here for server in each.servers}
    for table in tables:
        if isinstance(table, DiskTable):
            table.close()


def new_bytes(directory: Path, step: int) -> int:
    """Bytes of the files in a checkpoint that no other has."""
    files = (directory / "shards").glob(f"checkpoint-*-{step:010d}/*")
    return sum(file.stat().st_size for file in files if file.stat().st_nlink == 1)


def newest(directory: Path) -> tuple[int, Tensor]:
    """The newest checkpoint's step, and its rows: weights and Adagrad's square."""
    at = Checkpoints(directory, "hybrid").newest()
    assert at is not None
    return at.step, torch.cat([at.state["embeddings"]["weight"], at.state["embeddings"]["squares"][:, None]], 1)


@pytest.mark.parametrize(("servers", "folders"), [(1, False), (3, False), (2, True)])
def test_every_checkpoint_is_what_was_there_at_its_step(
    monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang], tmp_path: Path, folders: bool, servers: int
) -> None:
    """A base, logs, and a new base; updates go on while they are written; small files and blocks."""
    monkeypatch.setattr(logged, "FILE", 16 * 50)
    monkeypatch.setattr(logged, "BLOCK_BYTES", 16 * 7)
    first, saved = gang(folders=folders), {}
    for _ in range(8):
        first.train(2)
        saved[first.step] = first.whole
        assert first.save()
    for path in checkpoint.newest_first(tmp_path):
        at = checkpoint.read(path, "hybrid")
        whole = at.whole().state["embeddings"]
        assert torch.equal(torch.cat([whole["weight"], whole["squares"][:, None]], 1), saved[at.step]), "as eval reads"
    resumed = gang(servers, generation=2, folders=folders)
    assert torch.equal(resumed.whole, saved[resumed.step])
    resumed.train(2)
    expected = resumed.whole
    assert resumed.save()
    assert torch.equal(gang(2, 0, generation=3).whole, expected), "the table in memory reads it, too"


def test_a_log_has_what_changed_and_shares_the_rest(
    monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang], tmp_path: Path
) -> None:
    """In most of the spans nothing has changed."""
    monkeypatch.setattr(logged, "SPAN", 8)
    first = gang(1)
    assert first.save(busy=False)
    base = new_bytes(tmp_path, 0)
    assert base > ROWS * 16
    for resumed in (False, True):
        if resumed:
            first = gang(1, generation=2)
        first.train(1)
        assert first.save(busy=False)
        assert new_bytes(tmp_path, first.step) <= 4096 + 12 * 20, "12 rows with their numbers, and a header"
    first.train(40)
    assert first.save(busy=False)
    assert new_bytes(tmp_path, first.step) == base, "more than half of the rows have changed: a new base"


def test_after_many_logs_comes_a_base(
    monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang], tmp_path: Path
) -> None:
    monkeypatch.setattr(logged, "MOST_LOGS", 2)
    first, logs = gang(1), []
    for number in range(8):
        if number == 5:
            first = gang(1, generation=2)
        first.train(1, rows=2)
        assert first.save(busy=False)
        logs.append(new_bytes(tmp_path, first.step) < ROWS * 16)
    assert logs == [False, True, True, False, True, True, False, True]


def test_what_a_failed_checkpoint_had_is_in_the_next(
    monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang], tmp_path: Path
) -> None:
    """A full disk: it is named, training goes on, and the checkpoints before are as they were."""
    first = gang()
    first.train()
    assert first.save()
    kept = first.step - 3
    write = shardfile.write
    for fails in (True, True, False):
        full = MagicMock(side_effect=ShardError("cannot be written: No space left on device"))
        monkeypatch.setattr(shardfile, "write", full if fails else write)
        first.train(2)
        saved = first.whole
        assert first.save() is not fails
        step, whole = newest(tmp_path)
        assert step == (kept if fails else first.step - 3)
    assert torch.equal(whole, saved)


def test_a_file_system_without_hard_links_copies(monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang]) -> None:
    monkeypatch.setattr(os, "link", MagicMock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    first = gang()
    for _ in range(3):
        first.train()
        saved, step = first.whole, first.step
        assert first.save()
    resumed = gang(generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)


@pytest.mark.parametrize("folders", [False, True])
def test_files_that_are_gone_cost_one_checkpoint_at_most(
    gang: Callable[..., Gang], tmp_path: Path, folders: bool
) -> None:
    first = gang(folders=folders)
    first.train()
    assert first.save()
    for file in (tmp_path / "shards").glob("*/*"):
        file.unlink()
    first.train()
    first.save()
    first.train()
    saved, step = first.whole, first.step
    assert first.save()
    resumed = gang(generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("hurt", [flip, Path.unlink])
def test_a_hurt_log_has_the_checkpoint_before_used(
    gang: Callable[..., Gang], tmp_path: Path, hurt: Callable[[Path], object]
) -> None:
    first = gang()
    first.train()
    saved, step = first.whole, first.step
    assert first.save(busy=False)
    first.train()
    assert first.save(busy=False)
    folder = tmp_path / "shards" / checkpoint.newest_first(tmp_path)[0].stem
    hurt(next(file for file in folder.iterdir() if file.stat().st_nlink == 1))
    resumed = gang(generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)
    resumed.train()
    saved, step = resumed.whole, resumed.step
    assert resumed.save()
    resumed = gang(generation=3)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)


def test_a_writer_that_was_killed_leaves_the_checkpoint_before(gang: Callable[..., Gang], tmp_path: Path) -> None:
    first = gang()
    first.train()
    saved, step = first.whole, first.step
    assert first.save(busy=False)
    first.train()
    first.table.begin(first.step)  # and there is no manifest
    for server in first.servers:
        while not isinstance(server.share.written(f"checkpoint-000001-{first.step:010d}"), Written):
            pass
    resumed = gang(generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)
    resumed.train()
    assert resumed.save()
    assert len(list((tmp_path / "shards").iterdir())) == 2


def test_beyond_its_bound_a_change_waits_for_the_writer(
    monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang]
) -> None:
    monkeypatch.setattr(logged, "ASIDE", 32)
    monkeypatch.setattr(logged, "BLOCK_BYTES", 16)
    first = gang(1)
    first.train()
    saved, step = first.whole, first.step
    assert first.save()
    resumed = gang(1, generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)


def test_a_slow_writer_delays_no_update(monkeypatch: pytest.MonkeyPatch, gang: Callable[..., Gang]) -> None:
    monkeypatch.setattr(logged, "ASIDE", 32)
    first, released = gang(1, rpc_timeout=0.1), threading.Event()
    first.train()
    write = shardfile.write
    monkeypatch.setattr(shardfile, "write", lambda *args: released.wait(60) and write(*args))
    first.master.save(first.step, {"embeddings": first.table, "step": first.step}, drain=False)
    first.train(3)
    released.set()
    assert not first.master.require_saver().wait(60)
    monkeypatch.setattr(shardfile, "write", write)
    saved, step = first.whole, first.step
    assert first.save(busy=False)
    resumed = gang(1, generation=2)
    assert resumed.step == step
    assert torch.equal(resumed.whole, saved)


@pytest.mark.parametrize("saves", [False, True])
def test_a_kept_table_is_a_fresh_one_in_the_next_generation(
    gang: Callable[..., Gang], tmp_path: Path, saves: bool
) -> None:
    """Also if a checkpoint was being written, and what follows is logged from the same base."""
    first = gang()
    first.train()
    expected, step = (first.whole, 1) if saves else (gang(2, 0).whole, 0)
    if saves:
        assert first.save(busy=False)
        first.train(2)
        assert first.save(busy=False)
        expected, step = first.whole, first.step
    first.train(3)
    first.table.begin(first.step + 1)
    first.train(1, rows=40)
    resumed = gang(generation=2, kept=first)
    assert resumed.step == step
    assert torch.equal(resumed.whole, expected)
    resumed.train()
    expected, step = resumed.whole, resumed.step
    assert resumed.save()
    assert new_bytes(tmp_path, step) <= 2 * (4096 + 12 * 20) or not saves, "a log"
    again = gang(generation=3)
    assert (again.step, torch.equal(again.whole, expected)) == (step, True)
