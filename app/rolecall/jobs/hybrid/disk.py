"""A share of the table that is larger than its memory: rows in a file, the hot ones in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from rolecall import Rows
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.disk_log import LogStore
from rolecall.jobs.hybrid.disk_rows import HotRows
from rolecall.jobs.hybrid.table import Bags, Table
from rolecall.jobs.support import keep_freed_memory

FOLDER = "table"  # in CHECKPOINT_DIR, if TABLE_DIR is not set
MAX_HINTS = 64  # that wait for reading ahead; older ones are dropped
READ_AHEAD_ROWS = 256  # at once, which bounds the wait of a lookup
KEPT_BYTES = 2**21  # of freed memory


@dataclass(frozen=True, kw_only=True)
class _RowsOnDisk(Rows):
    """Rows that are set in `hot`; their tensor has only their shape."""

    hot: HotRows

    def put(self, values: Tensor, begin: int, first: int, step: int) -> None:
        self.put_numbered(values, torch.arange(begin, begin + len(values)), first, step)

    def set_rows(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        self.hot.set(rows, values)


class DiskTable(Table):
    """The rows of server `ordinal` in a file in TABLE_DIR, and `hot` of them in memory; 0: as many as TABLE_MEMORY has
    room for.

    Bit for bit the sums and updates of `Table`. Row-wise Adagrad's state, one number a row, stays in memory.
    """

    def __init__(self, settings: HybridSettings, ordinal: int, hot: int = 0) -> None:
        """Raises UsageError if the disk has no room."""
        keep_freed_memory(KEPT_BYTES)  # the blocks of checkpoints would leave gaps of a hundred megabytes
        rows = len(range(ordinal, settings.num_embeddings, settings.servers))
        store = LogStore(settings.table_dir or settings.checkpoint_dir / FOLDER, rows, settings.embedding_dim)
        super().__init__(settings, ordinal, weight=torch.zeros(()).expand(rows, settings.embedding_dim))
        self.hot = HotRows(store, hot or settings.hot_rows)
        self._hints: deque[Tensor] = deque(maxlen=MAX_HINTS)
        self._reader = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self._warned = False
        self._counted = (0, 0, 0.0)

    @torch.no_grad()
    def forward(self, bags: Bags) -> Tensor:
        """See `Table.forward`."""
        self._require_rows(bags.rows)
        if len(bags.rows) > self.hot.most and len(bags.rows.unique()) > self.hot.most:  # they do not fit at once
            return torch.cat([self._pool_apart(part) for part in self._parts(bags)])
        with self.hot.holding(bags.rows) as slots:
            return _pool(slots, self.hot.values, bags)

    def _parts(self, bags: Bags) -> Iterator[Bags]:
        """`bags` in parts of at most as many elements as rows can be held at once, or of one bag that has more."""
        begin, count = 0, len(bags.offsets) - 1
        while begin < count:
            most = bags.offsets[begin] + self.hot.most
            end = max(begin + 1, int(torch.searchsorted(bags.offsets, most, right=True)) - 1)
            offsets = bags.offsets[begin : end + 1]
            here = slice(int(offsets[0]), int(offsets[-1]))
            yield Bags(bags.rows[here], offsets - offsets[0], None if bags.weights is None else bags.weights[here])
            begin = end

    def _pool_apart(self, bags: Bags) -> Tensor:
        """The sums of `bags` from a copy of their rows, which takes no slots from others."""
        distinct, inverse = bags.rows.unique(return_inverse=True)
        return _pool(inverse, self.hot.fetch(distinct), bags)

    def update(self, rows: Tensor, gradient: Tensor) -> None:
        """See `Table.update`."""
        self._require_rows(rows)
        super().update(rows, gradient)

    def add(self, rows: Tensor, values: Tensor, factor: float) -> None:
        """See `Table.add`."""
        for part, share in zip(rows.split(self.hot.most), values.split(self.hot.most), strict=True):
            with self.hot.holding(part) as slots:
                self.hot.changed[slots] = True
                self.hot.values.index_add_(0, slots, share, alpha=factor)

    def rows(self) -> dict[str, Rows]:
        """See `Table.rows`; for reading back from a checkpoint."""
        rows = super().rows()
        weight = rows["weight"]
        on_disk = _RowsOnDisk(weight.tensors, weight.total, weight.first, weight.step, hot=self.hot)
        return {**rows, "weight": on_disk}

    def set(self, begin: int, values: Tensor) -> None:
        """See `Table.set`."""
        self.hot.set(torch.arange(begin, begin + len(values)), values)

    def fetch(self, rows: Tensor) -> dict[str, Tensor]:
        """The values of `rows` [n] int64, as a checkpoint holds them."""
        values = {"weight": self.hot.fetch(rows)}
        return {**values, "squares": self.squares[rows]} if len(self.squares) else values

    def prefetch(self, rows: Tensor) -> None:
        """Reads `rows` [n] int64 ahead, in another thread."""
        self._hints.append(rows)
        self._reader.submit(self._read_ahead)

    def _read_ahead(self) -> None:
        try:
            rows = self._hints.popleft()
            rows = rows[(rows >= 0) & (rows < len(self.weight))]
            for part in self.hot.missing(rows)[: self.hot.most].split(READ_AHEAD_ROWS):
                self.hot.bring(part)
        except (IndexError, TimeoutError):  # a hint that was dropped; the lookup of these rows raises it again
            return
        except Exception as error:
            if not self._warned:
                structlog.get_logger().warning(
                    "TABLE_DIR: rows cannot be read ahead; lookups wait for the disk", reason=repr(error)
                )
            self._warned = True

    def count(self, metrics: Any) -> None:
        """Sets the metrics of tables on disk."""
        now = (self.hot.read, self.hot.written, self.hot.waited)
        read, written, waited = (one - other for one, other in zip(now, self._counted, strict=True))
        metrics.hybrid_disk_rows.labels("read").inc(read)
        metrics.hybrid_disk_rows.labels("written").inc(written)
        metrics.hybrid_stall_seconds.labels("disk").inc(waited)
        self._counted = now

    def close(self) -> None:
        """Reads the remaining hints, and ends the threads."""
        self._reader.shutdown()
        self.hot.close()


def _pool(rows: Tensor, values: Tensor, bags: Bags) -> Tensor:
    vectors: Tensor = functional.embedding_bag(
        rows, values, bags.offsets, mode="sum", include_last_offset=True, per_sample_weights=bags.weights
    )
    return vectors
