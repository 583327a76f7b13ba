"""A share whose checkpoints hold what changed: a base, which has all rows, and logs of the rows that changed since.

Files of earlier checkpoints are part of the next one under the same name, without being copied. Base and logs are
alike: rows in any order, with their numbers, each once. Rows are written as they were at the checkpoint's step: one
that is about to change before its turn is set aside first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.checkpoint.capture import BLOCK_BYTES, Capture, CaptureError, Rows
from rolecall.checkpoint.shardfile import NUMBERS, Column, ShardError, ShardFile
from rolecall.checkpoint.shards import Disk, NewFile, Order, Share, Shares
from rolecall.errors import CallError

CHANGED, CAPTURED, PENDING = 1, 2, 4  # marks: since the last capture; in it; not written yet
MOST_LOGGED = 0.5  # rows in logs, of those in the base: beyond it a new base is written
MOST_LOGS = 64  # after a base: each is a file to link at a checkpoint, and to read at a resume
FILE = 2**27  # bytes of a file
ASIDE = 2**24  # bytes that are set aside; beyond it, changes wait for the disk
TOGETHER = 8  # if fewer than one row in so many is written, rows are fetched in the order of their numbers
SPAN = 2**17  # marks that are looked at at once: the numbers of rows found take 8 bytes each

Values = Mapping[str, Tensor]  # of some rows, by column


@dataclass(frozen=True)
class Chain:
    """The files of the checkpoint `stem` that are this share's: a base and its logs, which have `logged` rows."""

    stem: str
    files: tuple[ShardFile, ...]
    logged: int

    @property
    def logs(self) -> int:
        """How many checkpoints wrote logs: their stems are in the files' names."""
        return len({file.name.rsplit(".", 2)[0] for file in self.files}) - 1


class LoggedShare(Share):
    """As a `Share`, of rows that are fetched: `fetch(rows)` has the values of `rows` [n] int64 here by name. It is
    called in any thread; what changes meanwhile may have either value. `together()` has numbers of rows, those [n] at a
    time that are fetched fastest together; not necessarily all rows, nor each once. A checkpoint of many rows goes
    through it. `rows()` is for reading back.
    """

    def __init__(
        self,
        context: Any,
        name: str,
        rows: Callable[[], Mapping[str, Rows]],
        fetch: Callable[[Tensor], Values],
        at: Callable[[int, Callable[[], None]], object] = lambda step, begin: begin(),
        together: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._fetch, self._together, self._changes = fetch, together, threading.Condition()
        self._marks = torch.zeros(len(next(iter(rows().values()))), dtype=torch.uint8)
        self._chain: Chain | None = None  # of the newest checkpoint
        self._next: Chain | None = None  # of the one whose files were written last, and that may have come to nothing
        super().__init__(context, name, rows, at=at)

    def _give_up(self) -> None:
        """See `Share`."""
        super()._give_up()
        with self._changes:
            self._chain = self._next = None
            self._marks.zero_()

    def before(self, begin: int, end: int) -> None:
        """See `Share.before`."""
        self.before_rows(torch.arange(begin, end))

    def before_rows(self, rows: Tensor) -> None:
        """See `Share.before_rows`."""
        super().before_rows(rows)
        with self._changes:
            self._marks[rows] |= CHANGED

    def captured(self, order: Order) -> Capture:
        """The rows that changed since the newest checkpoint, or all rows."""
        with self._changes:
            if self._next is not None and self._next.stem in order.kept:
                self._chain = self._next
            else:  # it came to nothing: these rows are not in a checkpoint
                for marks in self._marks.split(SPAN):
                    marks |= (marks & CAPTURED) >> 1
            self._next, chain = None, self._chain
            counts = [(marks & CHANGED).count_nonzero() for marks in self._marks.split(SPAN)]
            changed = int(torch.stack(counts).sum())
            if chain is not None and (
                chain.stem == order.stem
                or chain.stem not in order.kept
                or chain.logged + changed > MOST_LOGGED * len(self._marks)
                or chain.logs >= MOST_LOGS
            ):
                chain = None
            for marks in self._marks.split(SPAN):
                marks &= CHANGED
                marks *= CAPTURED | PENDING
                if chain is None:
                    marks |= PENDING
            return ChangesCapture(
                f"{self}.{order.stem}",
                {name: Column.of(rows) for name, rows in self._rows().items()},
                changed if chain else len(self._marks),
                marks=self._marks,
                changes=self._changes,
                fetch=self._fetch,
                together=self._together,
                chain=chain,
                patience=self.settings.rpc_timeout / 2,
            )

    def _write(self, order: Order, capture: Capture, disk: Disk) -> list[ShardFile]:
        """See `Share`. After files that cannot be used again, the next checkpoint has all rows."""
        assert isinstance(capture, ChangesCapture)
        if chain := capture.chain:
            try:
                for file in chain.files:  # each has PHASE_TIMEOUT: without hard links it is copied
                    disk(Shares.link, chain.stem, file.name)
            except (ShardError, CallError):
                with self._changes:
                    self._chain = None
                raise
        files, logged = (chain.files, chain.logged + capture.count) if chain else ((), 0)
        files = (*files, *super()._write(order, capture, disk))
        with self._changes:
            if capture is self._capture:
                self._next = Chain(order.stem, files, logged)
        return [*files]

    def parts(self, order: Order, capture: Capture) -> Iterator[NewFile]:
        """See `Share.parts`."""
        assert isinstance(capture, ChangesCapture)
        return capture.parts()

    def _load(self, stem: str, files: list[ShardFile], resets: int) -> None:
        """See `Share`. If `files` has this very share, it is the base of the next checkpoint."""
        self._chain = self._next = None
        self._marks.zero_()
        super()._load(stem, files, resets)
        mine = [file for file in files if file.name.startswith(f"{self}.") and NUMBERS in file.columns]
        rows = self._rows()
        alike = all((c.total, c.first, c.step) == (rows[name].total, rows[name].first, rows[name].step)
                    for file in mine for name, c in file.columns.items() if name in rows)  # fmt: skip
        held = sum([file.columns[NUMBERS].shape[0] for file in mine])
        if alike and held >= len(self._marks):
            self._chain = Chain(stem, tuple(mine), held - len(self._marks))


class ChangesCapture(Capture):
    """The rows with the mark PENDING, `count` in all, as they are now, to be written after the files of `chain`."""

    def __init__(
        self,
        stem: str,
        columns: Mapping[str, Column],
        count: int,
        marks: Tensor,
        changes: threading.Condition,
        fetch: Callable[[Tensor], Values],
        together: Callable[[], Iterable[Tensor]],
        chain: Chain | None,
        patience: float,
    ) -> None:
        super().__init__({}, patience)
        self._progress, self._marks, self._fetch, self._together = changes, marks, fetch, together
        self.chain, self.count = chain, count
        # the largest column is written as it comes, the others after it
        self._sorted = dict(sorted(columns.items(), key=lambda each: -each[1].bytes))
        self._row_bytes = max(1, sum(column.bytes for column in columns.values()) // max(1, len(marks)))
        self._stem = stem
        self._set_aside_rows: deque[tuple[Tensor, Values]] = deque()

    def before_rows(self, rows: Tensor) -> None:
        """The `rows` [n] int64, each of which occurs once, are about to change."""
        with self._progress:
            rows = rows[(self._marks[rows] & PENDING) != 0].sort().values
        if not len(rows):
            return
        values = self._fetch(rows)
        with self._progress:
            if self._aside + len(rows) * self._row_bytes > ASIDE:
                self._wait(lambda: not self._aside)
            if self.problem:
                return
            claimed = self._claim(rows, values)
            self._set_aside_rows.append(claimed)
            self._aside += len(claimed[0]) * self._row_bytes

    def _claim(self, rows: Tensor, values: Values) -> tuple[Tensor, Values]:
        """Those of `rows` that are still to be written, which they are now: nobody has changed them before."""
        pending = (self._marks[rows] & PENDING) != 0
        self._marks[rows] &= ~PENDING & 0xFF
        return rows[pending], {name: each[pending] for name, each in values.items()}

    def _give_up(self, problem: str) -> None:
        self._set_aside_rows.clear()
        super()._give_up(problem)

    def _chunks(self) -> Iterator[tuple[Tensor, Values]]:
        """All rows, some at a time, with their values. Raises CaptureError."""
        per_block = max(1, BLOCK_BYTES // self._row_bytes)
        for span in self._spans():
            for rows in span.split(per_block) if len(span) else ():
                values = self._fetch(rows)
                with self._progress:
                    if self.problem:  # the marks may be those of another capture by now
                        raise CaptureError(self.problem)
                    claimed = self._claim(rows, values)
                yield claimed
                yield from self._drain()
            yield from self._drain()  # also if nothing of a span is to be written

    def _spans(self) -> Iterator[Tensor]:
        """All rows that are still to be written when it comes to them, some at a time."""
        for rows in self._together() if TOGETHER * self.count >= len(self._marks) else ():
            yield rows[(self._marks[rows] & PENDING) != 0]
        for begin in range(0, len(self._marks), SPAN):
            yield ((self._marks[begin : begin + SPAN] & PENDING) != 0).nonzero()[:, 0] + begin

    def _drain(self) -> Iterator[tuple[Tensor, Values]]:
        """What was set aside."""
        with self._progress:
            if self.problem:
                raise CaptureError(self.problem)
            aside, self._aside = list(self._set_aside_rows), 0
            self._set_aside_rows.clear()
            self._progress.notify_all()
        yield from aside

    def parts(self) -> Iterator[NewFile]:
        """The files, one after another."""
        chunks, most = _Chunks(self._chunks()), max(1, FILE // self._row_bytes)
        for number, begin in enumerate(range(0, self.count, most)):
            count = min(most, self.count - begin)
            columns = {key: Column(c.dtype, (count, *c.shape[1:]), c.total, c.first, c.step)
                       for key, c in self._sorted.items()}  # fmt: skip
            first = next(iter(columns.values()))
            columns[NUMBERS] = Column("I32", (count,), first.total, first.first, first.step)
            yield f"{self._stem}.{number:04d}.safetensors", columns, _bytes(chunks, count, list(self._sorted))


class _Chunks:
    """Chunks of rows, cut to measure."""

    def __init__(self, chunks: Iterator[tuple[Tensor, Values]]) -> None:
        self._chunks = chunks
        self._rest: tuple[Tensor, Values] | None = None

    def take(self, most: int) -> tuple[Tensor, Values]:
        """Some rows, at least one and at most `most`."""
        while self._rest is None or not len(self._rest[0]):
            self._rest = next(self._chunks)
        rows, values = self._rest
        self._rest = rows[most:], {name: each[most:] for name, each in values.items()}
        return rows[:most], {name: each[:most] for name, each in values.items()}


def _bytes(chunks: _Chunks, count: int, names: list[str]) -> Iterator[Tensor]:
    """The bytes of the next `count` rows: the first column as it comes, then the others, then the rows' numbers."""
    kept: dict[str, list[Tensor]] = {name: [] for name in (*names[1:], NUMBERS)}
    while count:
        rows, values = chunks.take(count)
        count -= len(rows)
        kept[NUMBERS].append(rows.int())
        for name in names[1:]:
            kept[name].append(values[name])
        yield values[names[0]].reshape(-1).view(torch.uint8)
    for each in kept.values():
        yield torch.cat(each).reshape(-1).view(torch.uint8)
