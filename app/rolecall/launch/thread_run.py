"""A run whose ranks are threads of this process, as `rolecall.start` holds it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.declare.spec import Job
from rolecall.errors import FAILED
from rolecall.inprocess.run import InProcessRun, require_possible
from rolecall.launch.ended import Ended
from rolecall.launch.in_process import Lines
from rolecall.launch.process_run import directory_of
from rolecall.messages.control import ListedRank

BEGIN_SECONDS = 60.0  # for a run to begin


class ThreadRun:
    """The ranks of `job`, called `name`, with `settings`. `show` is given each line of their logs; `stepped` is told of
    each step that rank 0 has made, in its thread. Raises UsageError if a rank needs a process of its own."""

    def __init__(
        self, job: Job, settings: Settings, name: str, show: Callable[[str], None], stepped: Callable[[int], None]
    ) -> None:
        description = describe.of_job(job, settings, name)
        require_possible(job, settings, description)  # before there is a directory
        given = "checkpoint_dir" in settings.model_fields_set
        directory = settings.checkpoint_dir if given else directory_of(registry.name_of(name))
        settings = settings.model_copy(update={"checkpoint_dir": directory.absolute()})
        self._run = InProcessRun(job, settings, description, Lines(show), stepped)
        self.directory = self._run.directory
        self._begun = threading.Event()
        self._over = False

    @property
    def up(self) -> bool:
        """Whether it takes commands."""
        return self._begun.is_set() and not self._over

    @property
    def page(self) -> str:
        """Nobody serves it."""
        return ""

    def ranks(self) -> list[ListedRank]:
        """Those that there are now."""
        return [ListedRank(*key, os.getpid(), "up") for key in self._run.members] if self.up else []

    def state(self) -> dict[str, Any]:
        """What a page would show; nothing before rank 0 coordinates."""
        return self._run.state() if self.up else {}

    def kill(self, member: str) -> None:
        """Kills the worker of a member. Raises UsageError."""
        self._run.kill(member)

    def scale(self, role: str, count: int) -> None:
        """Changes how many ranks a role has. Raises UsageError."""
        self._run.scale(role, count)

    def drain(self) -> None:
        """Has the job write a checkpoint, and end; does not wait."""
        if self._begun.wait(BEGIN_SECONDS) and not self._over:
            self._run.drain()

    def stop(self) -> None:
        """Ends it at once; does not wait."""
        self.drain()
        if not self._over:
            self._run.drain()

    def run(self) -> Ended:
        """Runs it until it is over. Raises UsageError."""

        async def main() -> int:
            asyncio.get_running_loop().call_soon(self._begun.set)
            return await self._run.run()

        try:
            code = asyncio.run(main())
        finally:
            self._over = True
            self._begun.set()
        reason = self._run.failure if code == FAILED else ""
        return Ended(self.directory, code, self._run.summary or {}, reason, self._run.raised)
