"""A rank's part in traces: its supervisor hands out what the worker recorded, and has it record on request.

Two queries. `trace` with `seconds` has a rank's worker record for as long, and the workers of the generations that
follow meanwhile; the reply is a cursor, {"file", "offset"}, at which that part begins. `spans` with a cursor is
answered with what comes at it:

    {"file", "offset"}   the cursor of the data, which is a later one where the given file had ended
    "data"               whole lines, as text, `CHUNK` bytes at most
    "next"               the offset behind the data
    "more"               whether there is more already
    "process"            the first line of the file, {} while there is none
    "ended"              whether the rank has no worker that adds to it

The cursor {"file": "", "offset": 0} is that of the oldest file. `collect` says that rank 0 collects, which has on its
disk what comes before the cursor: earlier files are deleted, and the worker records if it does not.
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
from rolecall.record.recorder import MOST
from rolecall.record.span_file import file_name

CHUNK = 2**20  # bytes of a reply
HAND_OVER = 5.0  # seconds that a rank, before its end, waits for rank 0 to have its spans
LONGEST = 3600.0  # seconds of a request
ROOM = 2**16  # bytes that a file may lack when it is full
Cursor = dict[str, Any]


class Recordings:
    """What the workers of this rank recorded, in its folder `directory`; `worker` is the newest of them."""

    def __init__(self, directory: Path, worker: Callable[[], WorkerProcess | None]) -> None:
        self.directory, self._worker = directory, worker
        self._until = float("-inf")  # monotonic seconds, of the newest request
        self._part = 0  # of the newest request
        self._collected = asyncio.Event()  # it has all there is, and no worker adds to it

    # ---- on and off

    async def trace(self, arguments: dict[str, Any]) -> Cursor:
        """Has the worker record for `seconds` from now on."""
        seconds = float(arguments.get("seconds", 10.0))
        if not 0 < seconds <= LONGEST:
            raise ValueError(f"seconds={seconds:g}: at most {LONGEST:g}")
        worker, now = self._running(), time.monotonic()
        if worker and self._until < now:
            path = self.directory / file_name(worker.task.generation, 0)  # of TRACE=1, here or at rank 0
            if 0 < (size := _size(path)) < MOST - ROOM:
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
        """Has a worker that began after the request, or of a rank without TRACE=1, record too."""
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
        """Waits, for HAND_OVER seconds at most, until rank 0 has collected everything. This rank's worker has ended,
        and its folder is about to be deleted."""
        self._collected.clear()
        if self._files(collect=True):
            try:
                await asyncio.wait_for(self._collected.wait(), HAND_OVER)
            except TimeoutError:
                telemetry.log().warning("rank 0 has not collected the end of this rank's trace", seconds=HAND_OVER)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, offset: int) -> tuple[str, bool]:
    """The whole lines of a file from `offset` on, up to `CHUNK` bytes, and whether there are more."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(CHUNK)
            more = len(data) == CHUNK and bool(file.read(1))
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
    """Has a supervisor reply to both queries, and hand over its worker's trace before its end."""
    recordings = Recordings(workers.files.directory, lambda: workers.worker)
    replies.on("trace", recordings.trace)
    replies.on("spans", recordings.spans)
    workers.before_leaving(recordings.hand_over)
