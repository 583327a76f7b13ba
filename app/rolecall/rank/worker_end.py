"""The worker's end of the pipe to its supervisor (`supervisor_end.py` is the other): reports, and orders to obey."""

from __future__ import annotations

import bdb
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

from rolecall import telemetry
from rolecall.context.context import Context
from rolecall.context.progress import Supervision
from rolecall.context.watchdog import Watchdog
from rolecall.declare import loader, registry
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.errors import ProgramError, UsageError
from rolecall.gang.protocol import DEBUGGING
from rolecall.messages import codec
from rolecall.messages import worker as messages
from rolecall.rank import stack_dump
from rolecall.rank.attaching import Attacher
from rolecall.record.files import longest_work
from rolecall.record.history import Row, Start
from rolecall.record.recorder import recorder
from rolecall.torch_rpc import failures, tracing
from rolecall.wire import clock

REPORT_SECONDS = 0.5
NO_DEBUGGER = (
    "has no terminal here: `rolecall debug` attaches to ranks of `rolecall run` on this machine, in breakpoint(); "
    "--in-process runs all ranks at the terminal; PYTHONBREAKPOINT may name a debugger that needs none"
)


class WorkerEnd(Supervision):
    """Safe to use from several threads. If the supervisor is gone, the process exits at once; `exit` takes its exit
    code, and does not return. `watchdog` is None for a check of the settings."""

    shows_stacks = "rolecall stacks RUN"

    def __init__(
        self,
        connection: Connection,
        task: Task,
        watchdog: Watchdog | None,
        exit: Callable[[int], NoReturn] = os._exit,  # runs no destructor of an RPC agent whose peers may be gone
    ) -> None:
        self._connection, self._task, self._watchdog, self._exit = connection, task, watchdog, exit
        self._over = threading.Event()  # no report is due any more
        self._lock = threading.Lock()
        self._step = 0
        self._sent_at = 0.0
        self._rows: list[Row] = []  # since the last report
        self._is_debugged = False

    # ---- reports

    def _send(self, message: messages.FromWorker) -> None:
        """Sends a message, with the lock held. The process exits if the supervisor is gone."""
        try:
            self._connection.send_bytes(codec.encode(message))
        except OSError:
            self._exit(1)
        self._sent_at = time.monotonic()

    def send(self, message: messages.FromWorker) -> None:
        """Sends a message."""
        with self._lock:
            self._send(message)

    def report(self) -> None:
        """Sends the newest step, the history's rows since the last report, the phase, and what takes long."""
        with self._lock:
            rows, self._rows = tuple(self._rows), []
            phase, calls = (self._watchdog.doing, self._watchdog.long_calls()) if self._watchdog else ("", ())
            phase = DEBUGGING if self._is_debugged else phase
            self._send(messages.Report(self._step, phase, rows, calls, longest_work()))

    def report_forever(self) -> None:
        """Sends reports at a fixed period. Once the function is stuck, reports that too: the supervisor ends this
        process then."""
        stuck = False
        while True:
            self.report()
            if self._watchdog and (unanswered := self._watchdog.unanswered()):
                telemetry.log().warning(f"{unanswered}; {self.shows_stacks}")
            if not stuck and self._watchdog and (problem := self._watchdog.check()):
                stuck = True
                self.report_stuck(problem)
            if self._over.wait(REPORT_SECONDS):
                return

    def report_loaded(self) -> None:
        """Reports that this worker is loaded, or needs its peers to go on: which is news if it has no generation."""
        self.send(messages.Loaded())

    def report_connected(self, generation: int, join: int) -> None:
        """Reports that this worker has met its peers."""
        self.send(messages.Connected(generation, join))

    def report_detached(self, generation: int, join: int, problem: str = "") -> None:
        """Reports that this worker is no part of `generation` any more, and so has made no step."""
        self._step = 0
        self.send(messages.Detached(generation, join, problem))

    def report_step(self, step: int) -> None:
        """Keeps `step` for the next report; the first step is sent at once."""
        first = self._step == 0
        self._step = step
        if first or time.monotonic() - self._sent_at > REPORT_SECONDS / 2:
            self.report()

    def record(self, row: Row) -> None:
        """Keeps a row of the run's history for the next report."""
        with self._lock:
            self._rows.append(row)
        if isinstance(row, Start):  # it counts, however soon this process is killed
            self.report()

    def report_lost(self, peer: Peer, replace: bool = False) -> None:
        """Reports a peer that was found dead or silent, or is to be replaced."""
        self.send(messages.PeerLost(peer, replace))

    def report_stuck(self, problem: str) -> None:
        """Reports that this process is stuck, and its stacks."""
        self.send(messages.Stuck(problem, stack_dump.dump()))

    def report_debugging(self, is_debugged: bool) -> None:
        """Reports that somebody debugs this process, or does no longer. Meanwhile no deadline of the run counts."""
        clock.hold("this worker", is_debugged)
        self._is_debugged = is_debugged
        # by another thread: the debugged one may be stopped where it holds the lock
        threading.Thread(target=self.report, name="debugging", daemon=True).start()

    def refuse_drain(self) -> None:
        """Reports that the drain's checkpoint could not be written."""
        self.send(messages.DrainRefused())

    # ---- the end

    def refuse_breakpoint(self, *_: object, **__: object) -> NoReturn:
        """Takes the place of `sys.breakpointhook`: ends the process, from any thread, as bad input."""
        at = sys._getframe(1)
        place = f"{loader.shown(Path(at.f_code.co_filename))}:{at.f_lineno}"
        self.end(messages.Result("refused", f"{place}: breakpoint() {NO_DEBUGGER}"))

    def conclude(self, outcome: Literal["finished", "drained"], step: int, summary: dict[str, Any]) -> None:
        """Reports `outcome` and ends the process."""
        self.end(messages.Result(outcome, step=step, summary=summary))

    def fail(self, problem: str | BaseException) -> NoReturn:
        """Reports a failure, as its text or as what the role's function raised, and ends the process."""
        self.end(messages.Result("failed", problem) if isinstance(problem, str) else self._raised(problem))

    def _raised(self, error: BaseException) -> messages.Result:
        if isinstance(error, UsageError):
            return messages.Result("refused", loader.explain(error))
        if isinstance(error, bdb.BdbQuit):
            return messages.Result("refused", f"{loader.explain(error)}: pdb {NO_DEBUGGER}")
        if failures.is_lost(error):
            return messages.Result("lost", failures.first_line(error))
        if self._task.check and loader.locate(error):
            return messages.Result("refused", loader.explain(error))
        program = isinstance(error, ProgramError)
        return messages.Result("failed", loader.with_place(error) if program else loader.users_traceback(error))

    def end(self, result: messages.Result | None = None) -> NoReturn:
        """Sends the last rows, spans and the `result`, if there is one, and ends the process."""
        self.report()
        recorder.flush()
        if result:
            self.send(result)
        self._exit(0)

    # ---- orders

    def obey_forever(self, context: Context[Any], attacher: Attacher) -> None:
        """Carries out the supervisor's orders."""
        while True:
            try:
                message: messages.ToWorker = codec.decode(messages.ToWorker, self._connection.recv_bytes())
            except (EOFError, OSError):
                self._exit(1)
            match message:
                case messages.Drain():
                    context.drain()
                case messages.Attach(attachment):
                    clock.hold("its generation", False)  # a worker that left one by itself may still hold it
                    attacher.attach(attachment)
                case messages.Update(attachment, paused):
                    clock.hold("its generation", paused)
                    context.group.update(attachment)
                case messages.Detach() if attacher.stays:
                    clock.hold("its generation", False)
                    attacher.detach()
                case messages.RecordTrace():
                    self.record_trace(message, context.group.newest)
                case messages.End() | messages.Detach():
                    self.end()

    def record_trace(self, order: messages.RecordTrace, attachment: Attachment | None) -> None:
        """Starts a trace of this process, as a part of the generation that it has now."""
        job, me, generation = registry.name_of(self._task.job), Peer(self._task.role, self._task.ordinal, 0), 0
        if attachment:
            me, generation = attachment.me, attachment.generation
        about = {"job": job, "role": me.role, "ordinal": me.ordinal, "rank": me.rank, "generation": generation}
        recorder.start(Path(order.path), about, order.seconds)
        tracing.watch_collectives()
