"""Writes a run's history to its file, in rank 0's supervisor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rolecall import telemetry
from rolecall.record import history, rundir
from rolecall.record.disk import Disk
from rolecall.record.history import History, Row

PERIOD_SECONDS = 1.0  # between two writes


class Journal:
    """The history of the run in `directory`, which is read at once, and its file, which `disk` writes. A failed write
    is logged once, and retried."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.path, self._disk = directory / rundir.HISTORY, disk
        self.log = telemetry.log()
        self._rows: list[Row] = []  # to be written
        self._turn = asyncio.Lock()
        self._size = 0  # of the whole lines in the file; a torn one may follow
        self._warned = False
        try:
            self.history = history.read(directory)
            if self.path.exists():
                self._size = self.path.read_bytes().rfind(b"\n") + 1
        except OSError as error:
            self.history = History()
            self._warn(error)

    def add(self, rows: list[Row]) -> None:
        """Queues `rows` for the next write."""
        self._rows += rows

    async def save_forever(self) -> None:
        """Writes new rows once a second."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.save()

    async def save(self) -> bool:
        """Writes the rows that are there. Returns whether they are written; others may have come meanwhile."""
        async with self._turn:
            if not self._rows:
                return True
            rows, self._rows = self._rows, []
            content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            try:
                await self._disk.run(self._write, content)
            except OSError as error:
                self._rows = [*rows, *self._rows]
                self._warn(error)
                return False
            return True

    def _write(self, content: bytes) -> None:
        with rundir.using(self.path), self.path.open("ab") as file:
            if file.tell() > self._size:
                file.truncate(self._size)
            file.write(content)
            file.flush()
            self._size = file.tell()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning(
                "the run's history cannot be written; training continues", file=str(self.path), problem=error.strerror
            )
