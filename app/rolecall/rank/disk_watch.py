"""Warns of a disk that is slow or hangs: of work on files, by this process or its worker, that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rolecall import telemetry
from rolecall.record.files import FileWork, longest_work

WARN_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two looks


class DiskWatch:
    """The account of one rank, whose files are in `directory` (CHECKPOINT_DIR); `of_worker` returns what its worker
    says of itself."""

    def __init__(self, directory: Path, of_worker: Callable[[], FileWork | None]) -> None:
        self._directory, self._of_worker = directory, of_worker
        self._warned = False
        self._longest = 0.0  # seconds, since the warning
        self.log = telemetry.log()

    def work(self) -> FileWork | None:
        """The work that has taken longest, of that under way."""
        both = [work for work in (longest_work(), self._of_worker()) if work is not None]
        return max(both, key=lambda work: work.seconds, default=None)

    @property
    def seconds(self) -> float:
        """How long that has taken; 0 for none."""
        work = self.work()
        return work.seconds if work else 0.0

    def look(self) -> None:
        """Logs a warning once work has taken `WARN_SECONDS`, and a line when that is over."""
        work = self.work()
        if work and work.seconds >= WARN_SECONDS:
            if not self._warned:
                self.log.warning(
                    f"CHECKPOINT_DIR={self._directory}: a file takes long; the disk is slow, or hangs",
                    file=work.path, seconds=round(work.seconds),
                )  # fmt: skip
            self._warned, self._longest = True, max(self._longest, work.seconds)
        elif self._warned:
            self.log.info(f"CHECKPOINT_DIR={self._directory}: the disk answers again", seconds=round(self._longest))
            self._warned, self._longest = False, 0.0

    async def look_forever(self) -> None:
        """Looks at a fixed period."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
