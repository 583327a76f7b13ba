"""One worker process, from its fork to its end, as its supervisor sees it. Pure logic.

Its rank's `RankWorkers` calls a method for each event, and `tick` once the deadline has passed. What is to be done
then, it passes to `do`, in order. Times are monotonic seconds.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

from rolecall.declare.task import Attachment
from rolecall.gang.protocol import ALIVE, ATTACHED, DEBUGGING, Join, LostPeer, Outcome, WorkerState, WorkerStatus
from rolecall.messages import worker as messages
from rolecall.record.files import FileWork
from rolecall.record.history import Row
from rolecall.record.pending_calls import Reported

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
MAX_ERROR_CHARS = 4000  # of an error, from its end, that are sent to rank 0
UNKNOWN_CODE = 255  # the fork server is gone too, and with it the exit code


@dataclass(frozen=True)
class Send:
    """Send the process a message."""

    message: messages.ToWorker


@dataclass(frozen=True)
class Record:
    """Record rows of the run's history."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class LogStacks:
    """Log the stacks of the process, which is `silent`, or has reported them itself as `text`. `dumped` follows."""

    silent: bool
    text: str = ""


@dataclass(frozen=True)
class Kill:
    """Send the process SIGKILL. `exited` follows."""


Effect = Send | Record | LogStacks | Kill


@dataclass(frozen=True)
class Exit:
    """How a process has exited: its code, negative for a signal, None if unknown; who or what killed it, in words; and
    the newest step in its metrics, which outlive it."""

    code: int | None
    killer: str = ""
    step: int = 0


class WorkerLife:
    """One worker, which is started with an `attachment`, or to load, or for a `check` of the settings.

    `generation` and `join` are those of its newest part in a generation, or of the one that it loads for.
    """

    def __init__(self, attachment: Attachment | None, *, check: bool, now: float, do: Callable[[Effect], None]) -> None:
        self.check, self._do = check, do
        self.state: WorkerState = "joining" if attachment else "loading"
        self.generation = attachment.generation if attachment else 0
        self.join = attachment.me.join if attachment else 0
        self.outcome: Outcome = ""
        self.error = ""
        self.step = 0
        self.summary: dict[str, object] = {}
        self.drains_failed = 0
        self._drains = False  # DRAIN was sent, and not refused
        self.lost_peers: tuple[LostPeer, ...] = ()
        self.phase, self.phase_since = "checking" if check else "", now
        self.long_calls: tuple[Reported, ...] = ()  # as of the last message
        self.file_work: FileWork | None = None  # so is this
        self.heard_at = now  # when it last sent something
        self.exists = False  # its process has been forked, and has not exited as far as is known
        self.exiting = False  # its process is over: no order is the reason for its end any more
        self._departure: tuple[Outcome, str] = "", ""  # of a ready worker: why it left its generation, and the error
        self._leave_because = ""  # what it leaves its generation for, while it is leaving
        self._leave_by = math.inf
        self._kill_outcome: Outcome = ""  # of a process that is to be killed
        self._dumping = False  # its stacks, before it is killed
        self.traced = False  # it records a trace
        self.changed = False  # its status is another one

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.state in ALIVE

    @property
    def attached(self) -> bool:
        """Whether it is a part of a generation, or becomes one."""
        return self.state in ATTACHED

    @property
    def is_debugged(self) -> bool:
        """Whether somebody debugs it, or is to: no time limit counts."""
        return self.alive and self.phase == DEBUGGING

    @property
    def is_killed(self) -> bool:
        """Whether it ends, or is to be killed or told to exit, and so becomes no part of a generation any more."""
        return self.exiting or bool(self._kill_outcome)

    @property
    def last_heartbeat(self) -> float | None:
        """When it last sent something; None without a process, and while it is debugged."""
        return self.heard_at if self.alive and self.exists and not self.is_debugged else None

    def status(self) -> WorkerStatus:
        """What rank 0 is told of it."""
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

    @property
    def deadline(self) -> float:
        """When `tick` is due."""
        return self._leave_by if self.alive and not self.is_debugged else math.inf

    # ---- the process

    def forked(self, now: float) -> None:
        """Its process exists."""
        self.exists, self.heard_at, self.changed = True, now, True
        if self.is_killed:
            self._do(Kill())

    def not_forked(self, problem: str, *, killed: bool) -> None:
        """There is no process, because of `problem`; `killed`: for a reason that is no fault of what it would run."""
        outcome: Outcome = self._kill_outcome or ("killed" if killed else "failed")
        self._end(outcome, problem)

    def exited(self, exit: Exit) -> None:
        """Its process has exited, and all that it sent was received."""
        self.exists, code = False, exit.code
        if self.outcome:  # it sent its result
            self._end(self.outcome, self.error)
        elif self._kill_outcome:
            self._end(self._kill_outcome, self.error)
        elif code == 0 and self.state == "leaving":  # its role does not stay
            self._end("stopped", self.error)
        elif code is not None and code < 0 and -code in CRASHES:
            self._end("crashed", f"ended by {signal.Signals(-code).name}")
        elif code is not None and 0 < code < UNKNOWN_CODE:
            self._end("crashed", f"ended with exit code {code}")
        else:
            self.step = max(self.step, exit.step)
            self._end("killed", exit.killer)

    def _end(self, outcome: Outcome, error: str) -> None:
        self.outcome, self.error, self.state, self.changed = outcome, error, "ended", True

    # ---- what it says

    def received(self, message: messages.FromWorker, now: float) -> None:
        """It sent `message`. Messages of a part that it has left, or has not begun, say nothing."""
        self.heard_at = now
        match message:
            case messages.Report():
                self._report(message, now)
            case messages.Loaded():
                self._move(self.state == "loading", "ready")
            case messages.Connected(generation, join):
                met: WorkerState = "draining" if self._drains else "running"
                self._move(self.state == "joining" and self._is_part(generation, join), met)
            case messages.Detached(generation, join, problem):
                if self.attached and self._is_part(generation, join):
                    self._left(problem or self._leave_because)
            case messages.DrainRefused():  # the worker has logged why
                self.drains_failed, self._drains, self.changed = self.drains_failed + 1, False, True
                self._move(self.state == "draining", "running")
            case messages.PeerLost(peer, replace):
                self.lost_peers += (LostPeer(Join(peer.role, peer.ordinal, peer.join), replace),)
                self.changed = True
            case messages.Stuck(problem, stacks):
                self.error = problem
                self._dump_and_kill("stuck", LogStacks(silent=False, text=stacks))
            case messages.Result(outcome, error, step, summary):
                self.outcome, self.error, self.step, self.summary = outcome, error, step, summary
                self.changed = True

    def _report(self, report: messages.Report, now: float) -> None:
        self._do(Record(report.rows))
        if self.phase != report.phase:
            if self.is_debugged:
                self._leave_by += now - self.phase_since
            self.phase_since, self.changed = now, True
        self.changed |= self.step == 0 and report.step > 0
        self.step, self.phase = report.step, report.phase
        self.long_calls, self.file_work = report.long_calls, report.file_work

    def _is_part(self, generation: int, join: int) -> bool:
        return (generation, join) == (self.generation, self.join)

    def _move(self, holds: bool, state: WorkerState) -> None:
        if holds:
            self.state, self.changed = state, True

    def _left(self, problem: str) -> None:
        self.state, self._departure, self._leave_by = "ready", ("lost" if problem else "stopped", problem), math.inf
        self.changed = True

    # ---- orders

    def relabel(self, generation: int, join: int) -> None:
        """It loads for that part in a generation from now on, or is ready for it."""
        if not self._is_part(generation, join):
            self.generation, self.join, self._departure, self.changed = generation, join, ("", ""), True

    def attach(self, attachment: Attachment) -> None:
        """It becomes a part of a generation."""
        if self.alive:
            self.generation, self.join, self.state = attachment.generation, attachment.me.join, "joining"
            self.drains_failed, self.lost_peers = 0, ()
            self._drains = False
            self._departure, self._leave_because, self._leave_by = ("", ""), "", math.inf
            if not self.outcome:  # otherwise it has sent its result, and exits: it ends as this part
                self.error, self.step, self.summary = "", 0, {}
                self._do(Send(messages.Attach(attachment)))
            self.changed = True

    def update(self, attachment: Attachment, *, drain: bool, paused: bool) -> None:
        """Others have joined its generation or were lost; `drain`: it is to write the last checkpoint; `paused`: one of
        them is debugged."""
        if self.attached:
            self._do(Send(messages.Update(attachment, paused)))
            if drain:
                self._drains = True
                self._do(Send(messages.Drain()))
                self._move(self.state == "running", "draining")

    def detach(self, by: float, problem: str = "") -> None:
        """It leaves its generation, perhaps because of `problem`; it is killed if it has not by then."""
        if self.attached and self.state != "leaving":
            self._leave_because, self._leave_by = problem, by
            self._move(True, "leaving")
            self._do(Send(messages.Detach()))
        elif self.attached:
            self._leave_by = min(self._leave_by, by)

    def end(self, by: float, now: float) -> None:
        """It writes what it has recorded, and exits; it is killed if it has not by then."""
        self._give_outcome("stopped")
        if by <= now:
            self._kill()
        else:
            self._leave_by = by
            self._do(Send(messages.End()))

    def kill(self, outcome: Outcome) -> None:
        """It is killed, and ends with `outcome`, unless it has sent a result, or its process was over before; a silent
        one once its stacks are logged."""
        if outcome == "silent" and self.exists and not self.exiting:
            self._dump_and_kill(outcome, LogStacks(silent=True))
        elif self.alive:
            self._give_outcome(outcome)
            self._kill()

    def fail(self, problem: str, *, outcome: Outcome = "failed") -> None:
        """It is killed because of `problem`, a failure of its own."""
        self.error = problem
        self.kill(outcome)

    def _give_outcome(self, outcome: Outcome) -> None:
        if not self.exiting:
            self._kill_outcome = self._kill_outcome or outcome

    def _dump_and_kill(self, outcome: Outcome, effect: LogStacks) -> None:
        self._kill_outcome = self._kill_outcome or outcome
        if not self._dumping:
            self._dumping = self.changed = True
            self._do(effect)

    def dumped(self) -> None:
        """Its stacks are logged."""
        self._kill()

    def _kill(self) -> None:
        self._leave_by = math.inf
        if self.exists:  # otherwise once it does
            self._do(Kill())

    def suspended(self, seconds: float) -> None:
        """The supervisor, and perhaps the worker, did not run for so long: that does not count."""
        self._leave_by += seconds

    def tick(self, now: float) -> None:
        """Moves on to `now`."""
        if now >= self.deadline:
            self._give_outcome("stopped")
            self._kill()
