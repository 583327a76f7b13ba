"""A rank's part in traces: its supervisor starts a recording on request, and replies with the worker's records."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.messages.queries import Cursor, Spans
from rolecall.messages.worker import RecordTrace
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.span_file import file_name

MAX_DATA_BYTES = 2**20  # of one reply
HAND_OVER_SECONDS = 5.0  # for which a rank, before its end, waits until rank 0 has collected its spans
MAX_RECORDING_SECONDS = 3600.0


class Recordings:
    """The records of this rank's workers, in its folder `directory`; `worker` is the newest of them."""

    def __init__(self, directory: Path, worker: Callable[[], WorkerProcess | None]) -> None:
        self.directory, self._worker = directory, worker
        self._until = float("-inf")  # monotonic seconds, of the newest request
        self._collected = asyncio.Event()  # it has all there is, and no worker adds to it

    # ---- on and off

    def start(self, seconds: float) -> Cursor:
        """Makes the worker record for `seconds` from now on. Returns where the recording begins. Raises ValueError for
        `seconds` out of range."""
        if not 0 < seconds <= MAX_RECORDING_SECONDS:
            raise ValueError(f"seconds={seconds:g}: at most {MAX_RECORDING_SECONDS:g}")
        worker = self._running()
        self._until = max(self._until, time.monotonic() + seconds)
        if worker is None:
            newest = self._worker()
            return Cursor(file_name(newest.generation, newest.join + 1) if newest else file_name(1))
        path = self.directory / file_name(worker.generation, worker.join)
        cursor = Cursor(path.name, path.stat().st_size if path.exists() else 0)
        self._record(worker, seconds)
        return cursor

    def _record(self, worker: WorkerProcess, seconds: float | None) -> None:
        worker.traced = True
        worker.send(RecordTrace(self.directory / file_name(worker.generation, worker.join), seconds))

    def _running(self) -> WorkerProcess | None:
        worker = self._worker()
        return worker if worker and worker.state == "running" and not worker.task.check else None

    # ---- what was recorded

    def spans(self, cursor: Cursor, collect: bool = False) -> Spans:
        """The next records; see `queries.ReadSpans`."""
        self._continue(collect)
        files = self._files()
        if collect:
            for path in files:
                if path.name < cursor.file:
                    path.unlink(missing_ok=True)
        files = [path for path in files if path.name >= cursor.file]
        worker = self._worker()
        ended = not (worker and worker.alive)
        spans = Spans(cursor.file, cursor.offset, "", next=cursor.offset, more=False, process={}, ended=ended)
        for path in files:
            begin = cursor.offset if path.name == cursor.file else 0
            data, more = _read(path, begin)
            spans = Spans(
                path.name,
                begin,
                data,
                next=begin + len(data.encode()),
                more=more or path != files[-1],
                process=_process(path),
                ended=ended,
            )
            if data or more:
                break
        if collect and ended and not spans.data and not spans.more:
            self._collected.set()
        return spans

    def _continue(self, collect: bool) -> None:
        """Makes a worker record that has started after the request, or that has TRACE=0."""
        worker, left = self._running(), self._until - time.monotonic()
        if worker and not worker.traced and (collect or left > 0):
            self._record(worker, None if collect else left)

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


def _read(path: Path, offset: int) -> tuple[str, bool]:
    """The whole lines of a file from `offset` on, MAX_DATA_BYTES at most, and whether there are more."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_DATA_BYTES)
            more = len(data) == MAX_DATA_BYTES and bool(file.read(1))
    except FileNotFoundError:  # deleted meanwhile
        return "", False
    end = data.rfind(b"\n") + 1  # the worker is writing the rest, or was killed
    return data[:end].decode(errors="replace"), more and bool(end)


def _process(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            kind, process = json.loads(file.readline())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(process) if kind == "process" else {}
