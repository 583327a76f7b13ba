"""A rank's spare workers (SPARES): they are loaded, have no generation, and take the place of a worker that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from rolecall import telemetry
from rolecall.gang.protocol import MAX_BACKOFF_SECONDS, Key
from rolecall.rank import fork_server
from rolecall.rank.worker_process import WorkerProcess

MAX_DOUBLINGS = 16  # of the pause after a spare that failed


class Spares:
    """`count` spares for `place`, loaded one after the other by `fill`. `make` makes a worker to load; `changed` is
    called whenever its status changes. They load only while they are `needed`: while the rank's own worker runs.

    A fork may take `limit` seconds. After a spare that failed, the next one waits for `pause` seconds, twice as long
    each time.
    """

    def __init__(
        self,
        place: Key,
        count: int,
        make: Callable[[], WorkerProcess],
        *,
        needed: Callable[[], bool],
        metrics: Any,
        limit: float,
        pause: float,
    ) -> None:
        self.place, self.count = place, count
        self.workers: list[WorkerProcess] = []  # that have not ended
        self._make, self._needed, self._metrics = make, needed, metrics
        self._limit, self._pause = limit, pause
        self._failures, self._next_at = 0, 0.0  # in a row; monotonic seconds
        self._filling: asyncio.Task[None] | None = None
        self._closed = False
        self._log = telemetry.log()

    @property
    def ready(self) -> Sequence[WorkerProcess]:
        """Those that are loaded."""
        return [worker for worker in self.workers if worker.state == "ready"]

    def fill(self) -> None:
        """Loads spares until all are there, unless that is under way."""
        if len(self.workers) < self.count and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        while len(self.workers) < self.count:
            await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
            if self._closed or not self._needed():
                return  # `fill` is called when they are needed again
            worker = self._make()
            self.workers.append(worker)
            await worker.start(self._limit)
            await worker.settle()

    def changed(self, worker: WorkerProcess) -> None:
        """The status of a spare has changed."""
        if worker.state == "ready":
            self._failures = 0
        elif not worker.alive and worker in self.workers:
            self.workers.remove(worker)
            if worker.outcome != "stopped":
                self._put_off(worker)
            if self._needed() and not self._closed:
                self.fill()
        self._metrics.spare_workers.set(len(self.ready))

    def _put_off(self, worker: WorkerProcess) -> None:
        pause = min(self._pause * 2 ** min(self._failures, MAX_DOUBLINGS), MAX_BACKOFF_SECONDS)
        self._failures, self._next_at = self._failures + 1, time.monotonic() + pause
        self._log.warning(
            "spare worker ended",
            outcome=worker.outcome,
            retry_s=pause,
            **telemetry.cause(worker.error),
        )

    def take(self) -> WorkerProcess | None:
        """A spare that is loaded, if there is one, to become the rank's worker: it is no spare any more."""
        worker = next(iter(self.ready), None)
        if worker:
            self.workers.remove(worker)
            self._metrics.spare_workers.set(len(self.ready))
        return worker

    async def close(self) -> None:
        """Ends all spares, one that is being forked as soon as it exists."""
        self._closed = True
        for worker in self.workers:
            worker.kill("stopped")
        ends = asyncio.gather(*(worker.ended.wait() for worker in self.workers if not worker.forking))
        await fork_server.within(ends, fork_server.KILL_SECONDS)
