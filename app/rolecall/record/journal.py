"""Writes a run's history to its file, in rank 0's supervisor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rolecall import telemetry
from rolecall.record import history, rundir
from rolecall.record.disk import Disk
from rolecall.record.history import History, Row

MAX_LINES = 50_000  # then the file is rewritten, without the points that a resume replaced
PERIOD_SECONDS = 1.0  # between two writes


class Journal:
    """The history of the run in `directory`, which is read at once, and its file, which `disk` writes. A failed write
    is logged once, and retried."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.path, self._disk = directory / rundir.HISTORY, disk
        self.log = telemetry.log()
        self._rows: list[Row] = []  # to be written
        self._turn = asyncio.Lock()
        self._lines = 0
        self._rewrite = True  # the first write removes a torn line and replaced points
        self._warned = False
        try:
            self.history = history.read(directory)
        except OSError as error:
            self.history = History()
            self._warn(error)

    def add(self, rows: list[Row]) -> None:
        """Queues `rows` for the next write."""
        self._rows += rows

    @property
    def unsaved(self) -> bool:
        """Whether rows wait for the next write."""
        return bool(self._rows)

    async def save_forever(self) -> None:
        """Writes new rows once a second."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Writes new rows."""
        async with self._turn:
            if not self._rows:
                return
            rows, self._rows = self._rows, []
            rewrite = self._rewrite or self._lines > MAX_LINES
            if rewrite:
                rows = self.history.rows()
            content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            try:
                await self._disk.run(self._write, content, rewrite)
            except OSError as error:
                self._rewrite = True
                self._rows = [*rows[:1], *self._rows]  # not empty, so that the next save rewrites the file
                self._warn(error)
                return
            self._rewrite, self._lines = False, len(rows) + (0 if rewrite else self._lines)

    def _write(self, content: bytes, rewrite: bool) -> None:
        if rewrite:
            rundir.write_atomically(self.path, content)
            return
        with rundir.using(self.path), self.path.open("ab") as file:
            file.write(content)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning(
                "the run's history cannot be written; training continues", file=str(self.path), problem=error.strerror
            )
