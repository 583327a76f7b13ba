"""Rank 0's collector of traces: copies the files of all ranks to CHECKPOINT_DIR/trace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rolecall import telemetry
from rolecall.gang.protocol import OVER, Key, name_of
from rolecall.messages.queries import ReadTrace
from rolecall.observe.trace import otlp
from rolecall.observe.trace.copies import TraceCopies
from rolecall.rank.coordinator import Coordinator
from rolecall.rank.tracing import HAND_OVER_SECONDS
from rolecall.record.records import FOLDER

PERIOD_SECONDS = 2.0  # between two collections
LAST_PERIOD_SECONDS = 0.1  # between two collections at the end of the job, when ranks wait for them
MAX_PENDING_QUERIES = 32  # each reply may have a megabyte
QUERY_TIMEOUT_SECONDS = 2.0


class Collector:
    """Copies the trace files of the gang's members, and exports their spans if OpenTelemetry's variables ask for it."""

    def __init__(
        self, coordinator: Coordinator, open_exporter: Callable[[], otlp.Exporter | None] = otlp.exporter
    ) -> None:
        self._coordinator, self._open_exporter = coordinator, open_exporter
        self._exporter: otlp.Exporter | None = None
        self._copies: dict[Key, TraceCopies] = {}
        self._ended: set[Key] = set()  # members that are about to end: they had nothing to add, and no worker
        self._closing, self._complete = False, asyncio.Event()
        self._warned = False
        self._turns = asyncio.Semaphore(MAX_PENDING_QUERIES)

    async def run(self) -> None:
        """Collects until `close`."""
        self._exporter = await asyncio.to_thread(self._open_exporter)
        while not (await self.collect() and self._closing):
            for _ in range(round(PERIOD_SECONDS / LAST_PERIOD_SECONDS)):
                await asyncio.sleep(LAST_PERIOD_SECONDS)
                if self._closing or self._coordinator.gang.state in (*OVER, "draining"):
                    break
        self._complete.set()

    async def close(self) -> None:
        """Waits for the rest of a run that ends here, for HAND_OVER_SECONDS at most."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), HAND_OVER_SECONDS)
        if self._exporter:
            await asyncio.to_thread(self._exporter.close)

    async def collect(self) -> bool:
        """Copies what there is, of all members at the same time. Returns whether no more will come of any."""
        members = {*self._coordinator.gang.members} - self._ended
        results = await asyncio.gather(*map(self._collect, members), return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors and not self._warned:  # whatever it is: the job goes on
            problem = getattr(errors[0], "strerror", None) or f"{type(errors[0]).__name__}: {errors[0]}"
            telemetry.log().warning("spans are not collected", problem=problem)
        self._warned = bool(errors)
        return all(result is True for result in results)

    async def _collect(self, key: Key) -> bool:
        coordinator = self._coordinator
        ending = self._closing or coordinator.gang.state in OVER
        copies = self._copies.setdefault(key, TraceCopies(coordinator.settings.checkpoint_dir / FOLDER, name_of(key)))
        while True:
            async with self._turns:
                question = ReadTrace(copies.have, collect=True)
                reply = (await coordinator.queries.ask(question, to=[key], timeout=QUERY_TIMEOUT_SECONDS))[key]
                chunk = await coordinator.files.disk.run(copies.add, reply)
            if not chunk.data:
                break
            if self._exporter:
                await asyncio.to_thread(self._exporter.export_lines, chunk.process, chunk.data)
        if ending and chunk.ended:
            self._ended.add(key)
        return chunk.ended
