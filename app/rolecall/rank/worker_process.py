"""The process of a worker: forks it, passes messages on, signals it, and finds out how it has exited."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from rolecall import telemetry
from rolecall.declare.task import Task
from rolecall.gang.protocol import Outcome
from rolecall.life.process import Effect, Exit, Kill, LogStacks, Send
from rolecall.life.workers import Batch, RankWorkers
from rolecall.messages import worker as messages
from rolecall.observe.cgroup import Cgroup
from rolecall.rank import descendants, fork_server, stack_dump
from rolecall.rank.supervisor_end import PipeError, SupervisorEnd

EXITING = 0x4  # PF_EXITING of Linux, in the flags of /proc/PID/stat


def _over(pidfd: int, pid: int) -> bool:
    """Whether the process has ended, or is ending: its connections close a moment before its end is visible."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return True
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]  # the name may contain blanks
    except OSError:  # it ended just now
        return True
    return bool(int(flags) & EXITING)


def _name_of(number: int) -> str:
    """A signal's name; of a realtime signal, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killer_of(pid: int) -> str:
    """Who has sent SIGKILL to a process of this rank, if that is known."""
    marked = descendants.mark(Path(tempfile.gettempdir()), os.getpid(), pid).exists()
    return "by `rolecall kill`" if marked else ""


def _run(task: Task, connection: Any) -> None:
    if task.settings.spares:
        descendants.adopt()  # its daemons stay below it, so that they do not end with another worker of this rank
    importlib.import_module(fork_server.MAIN).main(task, connection)  # in the worker, where it is loaded already


class WorkerProcess:
    """The process of worker `number`. `workers`, who decide its life, learn what happens to it, and `perform` does what
    follows."""

    def __init__(self, number: int, task: Task, workers: RankWorkers, perform: Callable[[Batch], None]) -> None:
        self.number, self.task, self.life = number, task, workers.lives[number]
        self._workers, self._perform = workers, perform
        ours, self._theirs = fork_server.context.Pipe()
        self._connection = SupervisorEnd(ours)
        self._pid = 0
        self._pidfd = -1
        self._tasks = set[asyncio.Task[None]]()
        self._oom_kills = Cgroup().oom_kills()

    @property
    def pid(self) -> int:
        """The process; 0 if it does not exist."""
        return self._pid if self._pidfd >= 0 else 0

    @property
    def over(self) -> bool:
        """Whether the process has ended, or is ending, though that was not noticed yet."""
        return self._pid != 0 and (self._pidfd < 0 or _over(self._pidfd, self._pid))

    def resident_bytes(self) -> int:
        """Its resident memory in bytes; 0 without a process."""
        try:
            return int(psutil.Process(self._pid).memory_info().rss) if self._pid and self.life.alive else 0
        except psutil.Error:
            return 0

    # ---- what is done to it

    def fork(self, limit: float) -> None:
        """Forks it. That it fails, or takes over `limit` seconds, is an end like any other."""
        self._begin(self._fork(limit))

    def do(self, effect: Effect) -> None:
        """Does what `effect` says."""
        match effect:
            case Send(message):
                self.send(message)
            case LogStacks():
                self._begin(self._log_stacks(effect))
            case Kill():
                self._kill()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fork(self, limit: float) -> None:
        stack_dump.forget(self.task.stacks)
        self._process = fork_server.context.Process(target=_run, args=(self.task, self._theirs), daemon=False)
        try:
            await asyncio.to_thread(fork_server.start, self._process, limit)
            self._pid = self._process.pid or 0
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            await self._end()  # it has ended already, and may have sent its result
            return
        except Exception as error:  # also one of pickling, or of a thread
            hint = Cgroup().ran_out(self._oom_kills)
            by_killer = isinstance(error, fork_server.ForkError) and error.killed
            if by_killer:
                hint = _killer_of(fork_server.server_pid()) or hint
            elif hint.endswith("?"):
                hint = ""
            problem = f"cannot fork: {error}{hint and '; '}{hint}"
            self._close()
            # what the worker would have run is not to blame if memory ran out
            self._perform(
                self._workers.not_forked(self.number, problem, time.monotonic(), killed=by_killer or bool(hint))
            )
            return
        finally:
            self._theirs.close()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._read)
        # not the process object's sentinel: that fires when the fork server dies, with the worker still alive
        loop.add_reader(self._pidfd, self._exited)
        self._perform(self._workers.forked(self.number, time.monotonic()))

    def send(self, message: messages.ToWorker) -> None:
        """Sends it a message, unless it has ended."""
        with contextlib.suppress(OSError):  # it has ended; its exit is on the way
            try:
                self._connection.send(message)
            except PipeError as error:
                self._break(error, "silent")

    def _kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _log_stacks(self, effect: LogStacks) -> None:
        """Logs its stacks: of a silent one, even if a thread holds the GIL."""
        try:
            if effect.silent:
                text = await stack_dump.of_silent(self._pidfd, self.task.stacks) if self.task.stacks else ""
            else:
                text = await stack_dump.native(self._pid) or effect.text
        except (OSError, RuntimeError) as error:  # no file or thread is left: it is killed all the same
            text = effect.text or f"they cannot be read: {error}"
        if text:
            log, life = telemetry.log(), self.life
            log.warning("stacks of the worker", generation=life.generation, step=life.step, exception=text)
        self._perform(self._workers.dumped(self.number, time.monotonic()))

    # ---- what happens to it

    def _read(self) -> None:
        try:
            for message in self._connection.receive():
                self._perform(self._workers.received(self.number, message, time.monotonic()))
        except PipeError as error:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._break(error, "failed")
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _break(self, error: PipeError, outcome: Outcome) -> None:
        """The pipe is of no use any more."""
        if self.over:
            self._workers.exiting(self.number)
        self._perform(self._workers.fail(self.number, f"the worker {error}", time.monotonic(), outcome=outcome))

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._begin(self._end())

    async def _end(self) -> None:
        self._read()
        self._close()
        exit = Exit(None)
        try:
            await asyncio.to_thread(self._process.join, 2)
            code = self._process.exitcode
            # its last report may be older than its metrics, which before its first one may be of the worker before
            step = telemetry.step_in(self.task.directory) if self.life.step and self.task.directory else 0
            exit = Exit(code, self._killer(code), step)
            await asyncio.to_thread(fork_server.clear, self._pid)  # the next worker begins after that
        except Exception as error:  # no file or thread is left, perhaps: it has ended all the same
            telemetry.log().error("what the worker has left behind may live on", problem=str(error))
        self._perform(self._workers.exited(self.number, exit, time.monotonic()))

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _killer(self, code: int | None) -> str:
        """What killed it. If the kernel's counts cannot tell, "out of memory" has a question mark."""
        hint = Cgroup().ran_out(self._oom_kills)
        if hint.endswith("?") and code != -signal.SIGKILL:
            hint = ""
        if code is None or code >= 0:
            return hint and f"killed; {hint}"
        hint = (_killer_of(self._pid) if code == -signal.SIGKILL else "") or hint
        return f"killed by {_name_of(-code)}{hint and '; '}{hint}"
