"""A rank's part in traces: its supervisor starts a recording on request, and replies with the worker's records."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

from rolecall import telemetry
from rolecall.gang.protocol import MET
from rolecall.messages.worker import RecordTrace
from rolecall.observe.trace.copies import Chunk
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.records import file_name

MAX_DATA_BYTES = 2**20  # of one reply
HAND_OVER_SECONDS = 5.0  # for which a rank, before its end, waits until rank 0 has collected its spans


class Recordings:
    """The records of this rank's workers, in its folder `directory`; `worker` is the newest of them."""

    def __init__(self, directory: Path, worker: Callable[[], WorkerProcess | None]) -> None:
        self.directory, self._worker = directory, worker
        self._until = float("-inf")  # monotonic seconds, of the newest request
        self._collected = asyncio.Event()  # rank 0 has all there is, and no worker adds to it

    def start(self, seconds: float) -> dict[str, int]:
        """Makes the worker record for `seconds` from now on, and those that follow it within that time. Returns the
        sizes of the files before."""
        self._until = max(self._until, time.monotonic() + seconds)
        sizes = {path.name: path.stat().st_size for path in self._files()}
        self._record(seconds, again=True)
        return sizes

    def _record(self, seconds: float, again: bool = False) -> None:
        """Makes the worker record; one that does so already, only if `again`."""
        worker = self._worker()
        if worker and worker.life.state in MET and not worker.life.check and (again or not worker.life.traced):
            worker.life.traced = True
            path = self.directory / file_name(worker.life.generation, worker.life.join)
            worker.send(RecordTrace(str(path), None if math.isinf(seconds) else seconds))

    def read(self, have: dict[str, int], collect: bool = False) -> Chunk:
        """See `queries.ReadTrace`."""
        left = math.inf if collect else self._until - time.monotonic()
        if left > 0:
            self._record(left)
        worker, now = self._worker(), time.monotonic_ns()
        ended = not (worker and worker.life.alive)
        for path in self._files():
            offset = have.get(path.name, 0)
            process, data = _read(path, offset)
            if data:
                return Chunk(path.name, offset, data, process=process, ended=ended, clock_ns=now)
        if collect and ended:
            self._collected.set()
        return Chunk(ended=ended, clock_ns=now)

    def _files(self) -> list[Path]:
        """The files, the oldest first."""
        return sorted(self.directory.glob("trace-*.jsonl"))

    async def hand_over(self) -> None:
        """Waits, for HAND_OVER_SECONDS at most, until rank 0 has collected everything. This rank's worker has ended,
        and its folder is about to be deleted."""
        self._collected.clear()
        if self._files():
            try:
                await asyncio.wait_for(self._collected.wait(), HAND_OVER_SECONDS)
            except TimeoutError:
                telemetry.log().warning(
                    "rank 0 has not collected the end of this rank's trace", seconds=HAND_OVER_SECONDS
                )


def _read(path: Path, offset: int) -> tuple[str, str]:
    """The first line of a file, and its whole lines from `offset` on, MAX_DATA_BYTES at most."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            file.seek(offset)
            data = file.read(MAX_DATA_BYTES)
    except FileNotFoundError:  # deleted meanwhile
        return "", ""
    end = data.rfind(b"\n") + 1  # the worker is writing the rest, or was killed
    return first.decode(errors="replace"), data[:end].decode(errors="replace")
