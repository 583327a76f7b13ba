"""Warns if work on files, by this process or its worker, takes long: the disk is slow or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rolecall import telemetry
from rolecall.record.files import FileWork, longest_work

WARN_SECONDS = 10.0
CHECK_SECONDS = 1.0  # between two checks


class DiskWatch:
    """Watches one rank, whose files are in `directory` (CHECKPOINT_DIR). `of_worker` returns the work that its worker
    reports."""

    def __init__(self, directory: Path, of_worker: Callable[[], FileWork | None]) -> None:
        self._directory, self._of_worker = directory, of_worker
        self._warned = False
        self._longest = 0.0  # seconds, since the warning
        self.log = telemetry.log()

    def work(self) -> FileWork | None:
        """The work under way that has taken longest; None for none."""
        both = [work for work in (longest_work(), self._of_worker()) if work is not None]
        return max(both, key=lambda work: work.seconds, default=None)

    @property
    def seconds(self) -> float:
        """The seconds that it has taken; 0 for none."""
        work = self.work()
        return work.seconds if work else 0.0

    def check(self) -> None:
        """Logs a warning once work has taken WARN_SECONDS, and a line when it is over."""
        work = self.work()
        if work and work.seconds >= WARN_SECONDS:
            if not self._warned:
                self.log.warning(
                    f"CHECKPOINT_DIR={self._directory}: a file takes long; the disk is slow, or hangs",
                    file=work.path,
                    seconds=round(work.seconds),
                )
            self._warned, self._longest = True, max(self._longest, work.seconds)
        elif self._warned:
            self.log.info(f"CHECKPOINT_DIR={self._directory}: the disk answers again", seconds=round(self._longest))
            self._warned, self._longest = False, 0.0

    async def check_forever(self) -> None:
        """Checks at a fixed period."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)
