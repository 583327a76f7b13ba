"""A supervisor's handle on its worker process: starts it, reads its messages, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rolecall import telemetry
from rolecall.declare.task import Attachment, Task
from rolecall.gang.protocol import ALIVE, ATTACHED, Join, LostPeer, Outcome, WorkerState, WorkerStatus
from rolecall.messages import worker as messages
from rolecall.observe.cgroup import Cgroup
from rolecall.rank import descendants, fork_server, stack_dump
from rolecall.rank.supervisor_end import PipeError, SupervisorEnd
from rolecall.record.files import FileWork
from rolecall.record.history import Journal
from rolecall.record.pending_calls import Reported

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
EXITING = 0x4  # PF_EXITING of Linux, in the flags of /proc/PID/stat
MAX_ERROR_CHARS = 4000  # of an error, from its end, that are sent to rank 0


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


def _ignore() -> None:
    """What calls `changed` for a worker that has ended."""


class WorkerProcess:
    """One worker, from `start` to its end. `changed` is called whenever its status changes. Rank 0's `journal` records
    the rows that it sends.

    `generation` and `join` are those of its newest part in a generation, or of the one that it loads for.
    """

    def __init__(self, task: Task, changed: Callable[[], None], journal: Journal | None = None) -> None:
        self.task = task
        self.state: WorkerState = "starting" if task.attachment or task.check else "loading"
        self.generation = task.attachment.generation if task.attachment else 0
        self.join = task.attachment.me.join if task.attachment else 0
        self.outcome: Outcome = ""
        self.error = ""
        self.step = 0
        self.summary: dict[str, Any] = {}
        self.drains_failed = 0
        self.lost_peers: tuple[LostPeer, ...] = ()
        self.phase = "checking" if task.check else ""
        self.phase_since = time.monotonic()
        self.long_calls: tuple[Reported, ...] = ()  # as of the last message
        self.file_work: FileWork | None = None  # so is this
        self.traced = task.settings.trace and not task.check  # it records a trace
        self._received_at = time.monotonic()
        self.ended = asyncio.Event()
        self._settled = asyncio.Event()  # it is ready, or has ended
        self._detached = asyncio.Event()  # from the newest generation, or it has ended
        self._departure: tuple[Outcome, str] = "", ""  # of a ready worker: why it left its generation, and the error
        self._detaching: str | None = None  # why; None unless it has been told to detach
        self._changed = changed
        self._journal = journal
        self._kill_outcome: Outcome = ""
        self._pid = 0
        self._pidfd = -1
        self._dumping: asyncio.Task[None] | None = None  # its stacks, before it is killed
        self._oom_kills = Cgroup().oom_kills()

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.state in ALIVE

    @property
    def forking(self) -> bool:
        """Whether its process does not exist yet."""
        return self.alive and not self._pid

    @property
    def last_heartbeat(self) -> float | None:
        """When it last sent something (monotonic seconds); None unless its process exists."""
        return self._received_at if self.alive and self._pidfd >= 0 else None

    @property
    def pid(self) -> int:
        """Its process; 0 if it does not exist."""
        return self._pid if self._pidfd >= 0 else 0

    @property
    def attached(self) -> bool:
        """Whether it is a part of a generation, or becomes one."""
        return self.state in ATTACHED

    def status(self) -> WorkerStatus:
        """Its status, for the gang."""
        outcome, error = (self.outcome, self.error) if self.attached or not self.alive else self._departure
        return WorkerStatus(
            generation=self.generation,
            join=self.join,
            state=self.state,
            outcome=outcome,
            error=error[-MAX_ERROR_CHARS:],
            step=self.step,
            summary=self.summary,
            drains_failed=self.drains_failed,
            lost_peers=self.lost_peers,
            phase=self.phase if self.alive else "",
        )

    async def start(self, limit: float) -> None:
        """Forks the worker. Returns when it exists; a failure to fork, or to do so within `limit` seconds, is an end
        like any other.
        """
        stack_dump.forget(self.task.stacks)
        ours, theirs = fork_server.context.Pipe()
        self._connection = SupervisorEnd(ours)
        self._process = fork_server.context.Process(target=_run, args=(self.task, theirs), daemon=False)
        try:
            await asyncio.to_thread(fork_server.start, self._process, limit)
            self._pid = self._process.pid or 0
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._read()  # it has ended already, and may have sent its result
            await self._end()
            return
        except (OSError, fork_server.ForkError) as error:
            hint = Cgroup().ran_out(self._oom_kills)
            if isinstance(error, fork_server.ForkError) and error.killed:
                self._kill_outcome = self._kill_outcome or "killed"
                hint = _killer_of(fork_server.server_pid()) or hint
            elif hint.endswith("?"):
                hint = ""
            elif hint:
                self._kill_outcome = self._kill_outcome or "killed"  # no fault of what the worker would have run
            await self._end(f"cannot fork: {error}{hint and '; '}{hint}")
            return
        finally:
            theirs.close()
        self._received_at = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._read)
        # not the process object's sentinel: that fires when the fork server dies, with the worker still alive
        loop.add_reader(self._pidfd, self._exited)
        if self._kill_outcome:
            self.kill(self._kill_outcome)

    def send(self, message: messages.ToWorker) -> None:
        """Sends it a message, unless it has ended."""
        with contextlib.suppress(OSError):  # it has ended; its exit is on the way
            try:
                self._connection.send(message)
            except PipeError as error:
                self.error = f"the worker {error}"
                self.kill("silent")

    async def settle(self) -> None:
        """Waits until it is ready, or has ended. One that loads for PHASE_TIMEOUT ends itself."""
        await self._settled.wait()

    def relabel(self, generation: int, join: int) -> None:
        """It loads for that part in a generation from now on, or is ready for it."""
        if (generation, join) != (self.generation, self.join):
            self.generation, self.join, self._departure = generation, join, ("", "")
            self._changed()

    def attach(self, attachment: Attachment) -> None:
        """Makes it a part of a generation. It is `running` once it has met the others."""
        if not self.alive:
            return
        self.generation, self.join, self.state = attachment.generation, attachment.me.join, "starting"
        self.outcome, self.error, self.step, self.summary = "", "", 0, {}
        self.drains_failed, self.lost_peers = 0, ()
        self._departure, self._detaching, self._detached = ("", ""), None, asyncio.Event()
        self.send(messages.Attach(attachment))
        self._changed()

    def update(self, attachment: Attachment) -> None:
        """Tells it who is in its generation now."""
        if self.attached:
            self.send(messages.Update(attachment))

    async def detach(self, patience: float, problem: str = "") -> None:
        """Takes it out of its generation, perhaps because of `problem`. Returns once it has confirmed that, or has
        ended; it is killed if it does neither within `patience` seconds."""
        if not self.attached:
            return
        detached = self._detached  # by the end of this wait it may be a part of another generation
        if self._detaching is None:
            self._detaching = problem
            self.send(messages.Detach())
        await fork_server.within(asyncio.ensure_future(detached.wait()), patience)
        if not detached.is_set():
            self.kill("stopped")
            await self.ended.wait()

    async def stop(self, patience: float) -> None:
        """Tells it to write its trace and exit. Returns once it has ended, or after `patience` seconds."""
        self._kill_outcome = self._kill_outcome or "stopped"
        self.send(messages.End())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), patience)

    def kill(self, outcome: Outcome) -> None:
        """Kills it; a silent one once it has dumped its stacks. Its outcome is `outcome`, unless it had ended before or
        sent a result."""
        if self._pid and self._pidfd < 0:
            return  # its end was noticed, and its exit code is being read
        if self._pidfd < 0 or not _over(self._pidfd, self._pid):
            self._kill_outcome = self._kill_outcome or outcome
        if outcome == "silent" and self._pidfd >= 0 and self.task.stacks:
            self._dumping = self._dumping or asyncio.create_task(self._dump_silent())
        else:
            self._sigkill()

    def fail(self, problem: str) -> None:
        """Kills it because of `problem`, a failure of its own."""
        self.error = problem
        self.kill("failed")

    async def dump(self) -> str:
        """The stacks of its threads, even if one of them holds the GIL; empty if there are none."""
        if self._pidfd < 0 or not self.task.stacks:
            return ""
        return await stack_dump.of_silent(self._pidfd, self.task.stacks)

    async def _dump_silent(self) -> None:
        self.log_stacks(await self.dump())
        self._sigkill()

    async def _end_stuck(self, text: str) -> None:
        """Ends it after it has reported that it is stuck, with the stacks `text`."""
        self.log_stacks(await stack_dump.native(self._pid) or text)
        self.kill("stuck")

    def log_stacks(self, text: str) -> None:
        """Logs the stacks `text`, if there are any."""
        if text:
            log = telemetry.log()
            log.warning("stacks of the worker", generation=self.generation, step=self.step, exception=text)

    def _sigkill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def resident_bytes(self) -> int:
        """Its resident memory in bytes; 0 without a process."""
        try:
            return int(psutil.Process(self._pid).memory_info().rss) if self._pid and self.alive else 0
        except psutil.Error:
            return 0

    def _read(self) -> None:
        try:
            for message in self._connection.receive():
                self._take(message)
        except PipeError as error:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self.fail(f"the worker {error}")
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _take(self, message: messages.FromWorker) -> None:
        self._received_at = time.monotonic()
        match message:
            case messages.Report():
                if self._journal:
                    self._journal.record(message.rows)
                first_step, phase_changed = self.step == 0 and message.step > 0, self.phase != message.phase
                if phase_changed:
                    self.phase_since = self._received_at
                self.step, self.phase = message.step, message.phase
                self.long_calls, self.file_work = message.long_calls, message.file_work
                if not (first_step or phase_changed):
                    return
            case messages.Loaded():
                if self.state != "loading":
                    return  # it is attached already
                self.state = "ready"
                self._settled.set()
            case messages.Connected(generation, join):
                if self.state != "starting" or (generation, join) != (self.generation, self.join):
                    return
                self.state = "running"
            case messages.Detached(generation, join, problem):
                if not self.attached or (generation, join) != (self.generation, self.join):
                    return
                problem = problem or self._detaching or ""
                self.state, self._departure = "ready", ("lost" if problem else "stopped", problem)
                self._settled.set()
                self._detached.set()
            case messages.DrainRefused(problem):
                self.drains_failed += 1
                self.error = problem
            case messages.PeerLost(peer, replace):
                self.lost_peers += (LostPeer(Join(peer.role, peer.ordinal, peer.join), replace),)
            case messages.Stuck(problem, dumped):
                self.error = problem
                self._dumping = self._dumping or asyncio.create_task(self._end_stuck(dumped))
                return
            case messages.Result(outcome, error, step, summary):
                self.outcome, self.error, self.step, self.summary = outcome, error, step, summary
        self._changed()

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._read()
        loop.remove_reader(self._connection.fileno())
        os.close(self._pidfd)
        self._pidfd = -1
        self._ending = asyncio.create_task(self._end())

    async def _end(self, error: str | None = None) -> None:
        code = None
        if error is None:  # it was forked
            await asyncio.to_thread(self._process.join, 2)
            code = self._process.exitcode
            await asyncio.to_thread(fork_server.clear, self._pid)  # the next worker begins after that
        if not self.outcome:
            if error:
                self.outcome, self.error = self._kill_outcome or "failed", error
            elif self._kill_outcome:
                self.outcome = self._kill_outcome
            elif code == 0 and self._detaching is not None and self.attached:  # its role does not stay
                self.outcome = "stopped"
            elif code is not None and code < 0 and -code in CRASHES:
                self.outcome, self.error = "crashed", f"ended by {signal.Signals(-code).name}"
            elif code is not None and 0 < code < 255:
                self.outcome, self.error = "crashed", f"ended with exit code {code}"
            else:  # 255: the fork server is gone too, and with it the exit code
                self.outcome, self.error = "killed", self._killer(code)
                self.step = max(self.step, self._step_made())
        self._connection.close()
        self.state = "ended"
        for event in (self._settled, self._detached, self.ended):
            event.set()
        self._changed()
        self._changed = _ignore  # the other one may refer to this object, whose pipes would wait for a collection

    def _step_made(self) -> int:
        """The newest step in its metrics, which outlive it: its last report may be older. 0 before it has reported a
        step: then the metrics may be of the worker before."""
        if not self.step or self.task.directory is None:
            return 0
        return telemetry.step_in(self.task.directory)

    def _killer(self, code: int | None) -> str:
        """What killed it. If the kernel's counts cannot tell, "out of memory" has a question mark."""
        hint = Cgroup().ran_out(self._oom_kills)
        if hint.endswith("?") and code != -signal.SIGKILL:
            hint = ""
        if code is None or code >= 0:
            return hint and f"killed; {hint}"
        hint = (_killer_of(self._pid) if code == -signal.SIGKILL else "") or hint
        return f"killed by {_name_of(-code)}{hint and '; '}{hint}"
