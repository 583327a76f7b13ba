"""Rank 0's collector of traces: writes the records of all workers to CHECKPOINT_DIR/trace."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.gang.protocol import OVER, Key, name_of
from rolecall.messages.codec import convert
from rolecall.messages.queries import Cursor, ReadSpans, Spans
from rolecall.observe.trace import otlp
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.tracing import HAND_OVER_SECONDS
from rolecall.record.records import FOLDER
from rolecall.record.span_file import file_name

PERIOD_SECONDS = 2.0  # between two collections
LAST_PERIOD_SECONDS = 0.1  # between two collections at the end of the job, when ranks wait for them
MAX_PENDING_QUERIES = 32  # each reply may have a megabyte
QUERY_TIMEOUT_SECONDS = 2.0
LOG_REPEAT_SECONDS = 30.0
Disk = Callable[..., Awaitable[Any]]  # runs a function in its thread
Ask = Callable[..., Awaitable[dict[Key, Any]]]  # `Queries.ask`


def collector(coordinator: Coordinator) -> Collector:
    """The collector of the gang of `coordinator`."""
    ending = (*OVER, "draining")
    return Collector(
        folder=coordinator.settings.checkpoint_dir / FOLDER,
        members=lambda: coordinator.gang.members,
        ask=coordinator.queries.ask,
        disk=coordinator.files.disk.run,
        over=lambda: coordinator.gang.state in ending,
        open_exporter=otlp.exporter,
    )


@dataclass
class Collector:
    """Collects the spans of the gang's `members` in `folder`, a file for each rank and generation. `over` returns
    whether the job is over; `disk` runs a function outside the event loop; `open_exporter` opens the export, if any."""

    folder: Path
    members: Callable[[], Collection[Key]]
    ask: Ask
    disk: Disk
    over: Callable[[], bool]
    open_exporter: Callable[[], otlp.Exporter | None] = lambda: None

    def __post_init__(self) -> None:
        self._exporter: otlp.Exporter | None = None
        self._cursors: dict[Key, Cursor] = {}
        self._ended: set[Key] = set()  # members that had nothing to add, and no worker
        self._closing = False
        self._complained = float("-inf")
        self._busy = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_PENDING_QUERIES)

    async def run(self) -> None:
        """Collects until the run is to end."""
        self._exporter = await asyncio.to_thread(self.open_exporter)
        while not self._closing:
            await self.collect()
            rested = 0.0
            while rested < PERIOD_SECONDS and not (self.over() and rested):
                await asyncio.sleep(LAST_PERIOD_SECONDS)
                rested += LAST_PERIOD_SECONDS

    async def finish(self) -> None:
        """Collects the rest of a run that ends here, for HAND_OVER_SECONDS at most."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while not await self.collect():  # noqa: ASYNC110 - rank 0 asks
                    await asyncio.sleep(LAST_PERIOD_SECONDS)
        if self._exporter:
            await asyncio.to_thread(self._exporter.close)

    async def collect(self, timeout: float = QUERY_TIMEOUT_SECONDS) -> bool:
        """Collects what there is, of all members at the same time. Returns whether no more will come of any."""
        async with self._busy:
            results = await asyncio.gather(
                *(self._collect(key, timeout) for key in [*self.members()]), return_exceptions=True
            )
        for result in results:
            if isinstance(result, Exception):  # whatever it is: the job goes on
                self._complain(result)
        return all(result is True for result in results)

    async def _collect(self, key: Key, timeout: float) -> bool:
        if key in self._ended and (self._closing or self.over()):
            return True
        if key not in self._cursors:
            self._cursors[key] = await self.disk(self._resume, key)
        more = True
        while more:
            cursor = self._cursors[key]
            async with self._turns:
                question = ReadSpans(cursor.file, cursor.offset, collect=True)
                reply = (await self.ask(question, to=[key], timeout=timeout))[key]
                if "error" in reply:
                    telemetry.log().debug("no spans", rank=name_of(key), problem=reply["error"])
                    return key not in self.members()
                spans: Spans = convert(Spans, reply)
                if spans.data:
                    await self.disk(self._write, key, spans)
            if spans.data and self._exporter:
                await asyncio.to_thread(self._exporter.export_lines, spans.process, spans.data)
            self._cursors[key] = Cursor(spans.file, spans.next)
            # an ended rank is asked again: an empty reply ends its wait in `hand_over`
            more = spans.more or (bool(spans.data) and spans.ended)
        if spans.ended and (self._closing or self.over()):
            self._ended.add(key)
        else:  # between two generations, a rank has no worker either
            self._ended.discard(key)
        return spans.ended

    def _path(self, key: Key, generation: int, join: int) -> Path:
        return self.folder / f"{name_of(key)}-{generation}{f'-{join}' if join else ''}.jsonl"

    def _resume(self, key: Key) -> Cursor:
        """If an earlier process of rank 0 has stopped: its files are copies of the ranks', from their beginning."""
        form = re.compile(rf"{name_of(key)}-(\d+)(?:-(\d+))?")
        matches = (form.fullmatch(path.stem) for path in self.folder.glob(f"{name_of(key)}-*.jsonl"))
        parts = [(int(match[1]), int(match[2] or 0)) for match in matches if match]
        if not parts:
            return Cursor()
        return Cursor(file_name(*max(parts)), self._path(key, *max(parts)).stat().st_size)

    def _write(self, key: Key, spans: Spans) -> None:
        """Appends to the file of a rank and generation. What was written of it before is known by its size."""
        self.folder.mkdir(exist_ok=True)
        path = self._path(key, int(spans.process["generation"]), int(spans.process.get("join", 0)))
        with path.open("ab") as file:
            if file.tell() > spans.offset:
                file.truncate(spans.offset)  # a write failed halfway
            file.write(spans.data.encode())

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._complained > LOG_REPEAT_SECONDS:
            self._complained = now
            problem = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            telemetry.log().warning("spans are not collected", folder=str(self.folder), problem=problem)
