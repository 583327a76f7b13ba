"""One run of a job in this process."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.spec import Job
from rolecall.errors import USAGE, UsageError
from rolecall.gang.protocol import OVER, Key, name_of
from rolecall.inprocess.process import is_debugged_elsewhere, prepared
from rolecall.inprocess.rank import Shared, ThreadSupervisor
from rolecall.record import rundir

INFORMED_SECONDS = 1.0  # for ranks to learn from rank 0 how the job ended, and to end
END_SECONDS = 10.0  # for ranks to end
STOP_SECONDS = 2.0  # and if the user does not wait for more
INTERRUPTED = 130  # exit code
ELSEWHERE = "run it without --in-process"


def require_possible(job: Job, settings: Settings, description: Description) -> None:
    """Raises UsageError if a rank of `job` needs a process of its own."""
    name = description.name
    if not job.rpc:
        raise UsageError(f"{name}: its program makes torch's RPC or process group, one a process; {ELSEWHERE}")
    for role, needs in description.needs.items():
        if gpus := needs.gpus:
            raise UsageError(f"role {role}: gpus={gpus} needs a process a rank; {ELSEWHERE}, or with DEVICE=cpu")
    if settings.trace:
        raise UsageError("TRACE=1: records one rank a process; leave it out, or run without --in-process")


class InProcessRun:
    """The ranks of `job`, which `description` describes. They log to `stream`. `stepped` is told of each step that rank
    0 has made, in its thread. Raises UsageError if a rank needs a process of its own.

    `drain`, `kill` and `scale` may be called from any thread, those of the job included, once the run has begun.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        description: Description,
        stream: Any,
        stepped: Callable[[int], None] = lambda step: None,
    ) -> None:
        require_possible(job, settings, description)
        given = settings.model_fields_set
        self.directory = settings.checkpoint_dir if "checkpoint_dir" in given else rundir.of_run(description.name)
        changes: dict[str, Any] = {"job": description.target, "checkpoint_dir": self.directory, "on_finish": "exit"}
        # a sink is a process; and what has failed once here is to be looked at
        changes |= {name: value for name, value in {"sinks": "none", "max_failures": 1}.items() if name not in given}
        self.job, self.description, self.settings = job, description, settings.model_copy(update=changes)
        self.summary: dict[str, Any] | None = None  # as in summary.json, once the run is over
        self.raised: BaseException | None = None  # the last that a role's function has raised
        self._stream, self._stepped = stream, stepped
        self._ranks: dict[Key, ThreadSupervisor] = {}
        self._tasks: dict[Key, asyncio.Task[int]] = {}
        self._wanted: dict[str, int] = {}  # of roles that were scaled
        self.leaving = self._left_debugger = False
        self._count = 0  # of ranks, so far

    async def run(self) -> int:
        """Runs the job until it is over. Returns rank 0's exit code; 130 after `drain`. Raises UsageError."""
        self._loop, self._changed, self._stopped = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        elsewhere = is_debugged_elsewhere()
        with (
            prepared(self.settings, self._quit, self._stream),
            tempfile.TemporaryDirectory(prefix="rolecall-") as folder,
        ):
            self._shared = Shared(
                self.job,
                self.description,
                self.settings,
                Path(folder),
                secrets.randbelow(2**31),
                stepped=self._stepped,
                is_debugged_elsewhere=elsewhere,
            )
            for role in self.description.roles:
                for ordinal in range(role.count):
                    self._start((role.name, ordinal))
            try:
                return await self._until_over()
            finally:
                for task in self._tasks.values():
                    task.cancel()
                limit = STOP_SECONDS if self._stopped.is_set() else END_SECONDS
                await asyncio.wait(self._tasks.values(), timeout=limit)
                if self._shared.coordinator.done():
                    self.summary = self._shared.coordinator.result().files.summary
                self.raised = next(reversed(self._shared.raised), None)

    def _start(self, key: Key) -> None:
        rank = self._ranks[key] = ThreadSupervisor(self._shared, Identity(*key), self._count)
        self._count += 1
        task = self._tasks[key] = asyncio.create_task(rank.run(), name=name_of(key))
        task.add_done_callback(lambda task: self._ended(key, task))
        self._changed.set()

    async def _until_over(self) -> int:
        """Until rank 0 has ended, another rank has failed, or the run is stopped."""
        rank0, stopped = next(iter(self._tasks)), asyncio.create_task(self._stopped.wait())
        failed = False
        while not failed and not self._tasks[rank0].done() and not stopped.done():
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            pending = {task for task in self._tasks.values() if not task.done()}
            await asyncio.wait({*pending, changed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            failed = any(task.done() and (task.exception() or task.result()) for task in self._tasks.values())
        # rank 0 writes the report last
        limit = INFORMED_SECONDS if self._tasks[rank0].done() else END_SECONDS
        if not stopped.done() and (pending := {task for task in self._tasks.values() if not task.done()}):
            everyone = asyncio.create_task(asyncio.wait(pending))
            await asyncio.wait({everyone, stopped}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            everyone.cancel()
        stopped.cancel()
        if self._left_debugger:
            raise UsageError("the debugger was left by `q`, or at the end of its input; `c` goes on")
        return INTERRUPTED if self.leaving else self._code()

    def _code(self) -> int:
        """The exit code of the first rank that has ended with one. Raises what ended a rank."""
        for key, task in self._tasks.items():
            if task.done() and (code := task.result()):
                directive = self._ranks[key].member.directive
                if code == USAGE and directive is not None and directive.kind == "failed":
                    raise UsageError(directive.reason)
                return code
        return 0

    @property
    def failure(self) -> str:
        """Why the job has failed."""
        gang = self._shared.coordinator.result().gang
        return gang.reason if gang.state in OVER else ""

    @property
    def members(self) -> list[Key]:
        """Those whose ranks have not ended."""
        return [key for key, task in [*self._tasks.items()] if not task.done()]

    def state(self) -> dict[str, Any]:
        """What a page shows of it now; nothing before rank 0 coordinates. For other threads."""
        rank0 = next(iter(self._ranks.values()))

        async def state() -> dict[str, Any]:
            return rank0.state()

        return asyncio.run_coroutine_threadsafe(state(), self._loop).result(STOP_SECONDS)

    def _quit(self) -> None:
        self._left_debugger = True
        self._loop.call_soon_threadsafe(self._stopped.set)

    def drain(self) -> None:
        """Has the job write a checkpoint, and end; at the second time, ends it at once."""
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self.leaving:
            self._stopped.set()
        self.leaving = True
        for rank in self._ranks.values():
            rank.leave("drain")

    def kill(self, name: str) -> None:
        """Kills the worker of the member `name`, as a crash does: it raises at its next call. Its rank starts another
        one. Raises UsageError for a member without a worker."""
        rank = next((rank for key, rank in self._ranks.items() if name_of(key) == name), None)
        if rank is None or not rank.kill():
            raise UsageError(f"{name}: has no worker now; members are {', '.join(map(name_of, self._ranks))}")

    def scale(self, role: str, count: int) -> None:
        """Starts ranks of an elastic role, or has those with the highest ordinals leave, so that there are `count`.
        Raises UsageError if that is not possible."""
        spec = next((spec for spec in self.description.roles if spec.name == role and spec.elastic), None)
        if spec is None or not spec.minimum <= count <= spec.maximum:
            bounds = f"the job allows {spec.minimum} to {spec.maximum}" if spec else "is no elastic role"
            raise UsageError(f"{role}={count}: {bounds}")
        self._loop.call_soon_threadsafe(self._scale, role, count)

    def _scale(self, role: str, count: int) -> None:
        self._wanted[role] = count
        here = {key for key, task in self._tasks.items() if key[0] == role and not task.done()}
        for key in here:
            if key[1] >= count:
                self._ranks[key].leave("scale")
        for key in {(role, ordinal) for ordinal in range(count)} - here:
            self._start(key)  # the others once they have left, if they do

    def _ended(self, key: Key, task: asyncio.Task[int]) -> None:
        """A rank has ended. One that has left is started again if it is wanted by now."""
        member, in_order = self._ranks[key].member, not task.cancelled() and not task.exception() and not task.result()
        over = self.leaving or (member.directive is not None and member.directive.kind in OVER)
        if member.hurried and in_order and not over and key[1] < self._wanted.get(key[0], 0):
            self._start(key)
