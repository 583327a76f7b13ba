"""A rank's part in traces: its supervisor replies with the worker's records, and starts a recording on request.

Two queries. `trace` with `seconds` starts a recording of the rank's worker, and of the workers of generations within
that time; the reply is a cursor, {"file", "offset"}, at which it begins. `spans` replies with the data at a cursor:

    {"file", "offset"}   the cursor of the data, a later one if the given file has ended
    "data"               whole lines, as text, `MAX_REPLY_BYTES` at most
    "next"               the offset behind the data
    "more"               whether there is more already
    "process"            the first line of the file, {} while there is none
    "ended"              whether the rank has no worker that adds to it

The cursor {"file": "", "offset": 0} is that of the oldest file. With `collect` rank 0 asks, which has
written everything before the cursor: earlier files are deleted, and the worker starts to record.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall import telemetry
from rolecall.rank.pipe_messages import RecordTrace
from rolecall.rank.queries import Replies
from rolecall.rank.worker_manager import WorkerManager
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.recorder import MAX_FILE_BYTES
from rolecall.record.span_file import file_name

MAX_REPLY_BYTES = 2**20
HAND_OVER_SECONDS = 5.0  # in which a rank, before its end, waits for rank 0 to collect its spans
MAX_RECORDING_SECONDS = 3600.0
MIN_ROOM_BYTES = 2**16  # a file with less room counts as full
Cursor = dict[str, Any]


class Recordings:
    """The records of this rank's workers, in its folder `directory`; `worker` is the newest of them."""

    def __init__(self, directory: Path, worker: Callable[[], WorkerProcess | None]) -> None:
        self.directory, self._worker = directory, worker
        self._until = float("-inf")  # monotonic seconds, of the newest request
        self._part = 0  # of the newest request
        self._collected = asyncio.Event()  # it has all there is, and no worker adds to it

    # ---- on and off

    async def trace(self, arguments: dict[str, Any]) -> Cursor:
        """Makes the worker record for `seconds` from now on."""
        seconds = float(arguments.get("seconds", 10.0))
        if not 0 < seconds <= MAX_RECORDING_SECONDS:
            raise ValueError(f"seconds={seconds:g}: at most {MAX_RECORDING_SECONDS:g}")
        worker, now = self._running(), time.monotonic()
        if worker and self._until < now:
            path = self.directory / file_name(worker.task.generation, 0)  # of TRACE=1, here or at rank 0
            if 0 < (size := _size(path)) < MAX_FILE_BYTES - MIN_ROOM_BYTES:
                return {"file": path.name, "offset": size}
        if self._until < now:
            self._part += 1
        self._until = max(self._until, now + seconds)
        if worker is None:
            return {"file": file_name(self._generation + 1, 0), "offset": 0}
        path = self._record(worker, self._part)
        return {"file": path.name, "offset": _size(path)}

    def _record(self, worker: WorkerProcess, part: int) -> Path:
        path = self.directory / file_name(worker.task.generation, part)
        seconds = self._until - time.monotonic() if part else None
        worker.traced = True
        worker.send(RecordTrace(path, seconds))
        return path

    def _running(self) -> WorkerProcess | None:
        worker = self._worker()
        return worker if worker and worker.state == "running" and worker.task.members else None

    @property
    def _generation(self) -> int:
        worker = self._worker()
        return worker.task.generation if worker else 0

    # ---- what was recorded

    async def spans(self, arguments: Cursor) -> dict[str, Any]:
        """The next lines; see above."""
        name, offset, collect = str(arguments["file"]), int(arguments["offset"]), bool(arguments.get("collect"))
        self._keep_on(collect)
        files = self._files(collect)
        if collect:
            for path in [path for path in files if path.name < name]:
                path.unlink(missing_ok=True)
        here = [path for path in files if path.name >= name]
        worker = self._worker()
        ended = not (worker and worker.alive)
        reply: dict[str, Any] = {"file": name, "offset": offset, "data": "", "next": offset, "more": False,
                                 "process": {}, "ended": ended}  # fmt: skip
        for number, path in enumerate(here):
            last, begin = number == len(here) - 1, offset if path.name == name else 0
            data, more = _read(path, begin)
            reply = {"file": path.name, "offset": begin, "data": data, "next": begin + len(data.encode()),
                     "more": more or not last, "process": _process(path), "ended": ended}  # fmt: skip
            if data or more:
                break
        if collect and ended and not reply["data"] and not reply["more"]:
            self._collected.set()
        return reply

    def _keep_on(self, collect: bool) -> None:
        """Makes a worker record that began after the request, or without TRACE=1."""
        worker = self._running()
        if worker and not worker.traced:
            if collect:
                self._record(worker, 0)
            elif self._until > time.monotonic():
                self._record(worker, self._part)

    def _files(self, collect: bool) -> list[Path]:
        """The files, the oldest first; those of requests are not collected."""
        paths = sorted(self.directory.glob("trace-*.jsonl"))
        return [path for path in paths if path.stem.endswith("-0000")] if collect else paths

    async def hand_over(self) -> None:
        """Waits, for HAND_OVER_SECONDS at most, until rank 0 has collected everything. This rank's worker has ended,
        and its folder is about to be deleted."""
        self._collected.clear()
        if self._files(collect=True):
            try:
                await asyncio.wait_for(self._collected.wait(), HAND_OVER_SECONDS)
            except TimeoutError:
                telemetry.log().warning(
                    "rank 0 has not collected the end of this rank's trace", seconds=HAND_OVER_SECONDS
                )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, offset: int) -> tuple[str, bool]:
    """The whole lines of a file from `offset` on, up to `MAX_REPLY_BYTES`, and whether there are more."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_REPLY_BYTES)
            more = len(data) == MAX_REPLY_BYTES and bool(file.read(1))
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


def register(replies: Replies, workers: WorkerManager) -> None:
    """Makes a supervisor reply to both queries, and wait at its end until its worker's trace is collected."""
    recordings = Recordings(workers.files.directory, lambda: workers.worker)
    replies.on("trace", recordings.trace)
    replies.on("spans", recordings.spans)
    workers.before_leaving(recordings.hand_over)
