"""The workers of one rank: the one that is its part of the gang, spares that may take its place, and the check of the
settings before. Pure logic.

The driver knows each worker by its number. It calls a method for each event, does what the returned batch says, in
order, and calls `tick` once its deadline has passed. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rolecall.declare.task import Attachment, Peer
from rolecall.errors import UsageError
from rolecall.gang.member import Action
from rolecall.gang.protocol import MAX_BACKOFF_SECONDS, MET, OVER, Directive, Key, Outcome, WorkerStatus, name_of
from rolecall.life import process
from rolecall.life.process import Exit, WorkerLife
from rolecall.messages.worker import FromWorker

UNDECIDED = ("killed", "silent", "lost")  # outcomes of a check that say nothing about the settings
CHECK_TRIES = 3
LOG_REPEAT_SECONDS = 30.0
TRACE_FLUSH_SECONDS = 0.5  # that a worker which is to end has for the end of its trace
EXPECTED = ("finished", "drained", "stopped")
MAX_DOUBLINGS = 16  # of the pause after a spare that failed
MIN_SPARE_PAUSE_SECONDS = 1.0  # whatever the role says: one that cannot be made fails at once


@dataclass(frozen=True)
class Times:
    """Settings of the same names, in seconds."""

    lease: float
    phase_timeout: float


@dataclass(frozen=True)
class SpareRules:
    """How many spares a role has, and the seconds until the next one after one that failed, twice as many each time."""

    count: int
    pause: float


@dataclass(frozen=True)
class Make:
    """There is a worker `number`, for `place`: of an attachment, or to load; or a check of the settings. Fork it:
    `forked` or `not_forked` follows."""

    number: int
    place: Key
    attachment: Attachment | None = None
    check: bool = False


@dataclass(frozen=True)
class Do:
    """Do `effect` for the worker `number`."""

    number: int
    effect: process.Effect


@dataclass(frozen=True)
class LogEnd:
    """Log, and count, that the worker `number` has ended."""

    number: int


@dataclass(frozen=True)
class LogDeparture:
    """Log that the worker `number` has left its generation by itself."""

    number: int


@dataclass(frozen=True)
class LogTakeOver:
    """Log that the spare `number` is the rank's worker now."""

    number: int


@dataclass(frozen=True)
class LogSpareEnd:
    """Log that a spare has ended; the next one loads in `retry` seconds."""

    outcome: Outcome
    error: str
    retry: float


@dataclass(frozen=True)
class LogChecking:
    """Log that the check of the settings has taken `seconds` so far."""

    seconds: float


@dataclass(frozen=True)
class Joined:
    """A worker that was attached has met the others, after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class HandOver:
    """Wait until rank 0 has collected what was traced: no worker adds to it. `handed_over` follows."""


@dataclass(frozen=True)
class Refuse:
    """The rank cannot work because of `problem`: with the `settings`, or with what this machine has."""

    problem: str
    settings: bool = True


Effect = Make | Do | LogEnd | LogDeparture | LogTakeOver | LogSpareEnd | LogChecking | Joined | HandOver | Refuse


@dataclass(frozen=True)
class Check:
    """A check of the settings for `role`, under way since `began`. It is tried again while `tries` are left, and there
    are none once it has taken too long."""

    role: str
    began: float
    log_at: float
    tries: int = CHECK_TRIES


@dataclass(frozen=True)
class Batch:
    """What is to be done now, in order, and when `tick` is due. `changed`: the status is another one. `done`: the
    action, or the check, that was under way is carried out."""

    effects: tuple[Effect, ...] = ()
    deadline: float = math.inf
    changed: bool = False
    done: bool = False


class RankWorkers:
    """The workers of a rank with `role`, which is empty if the gang assigns one. Unless it is rank 0, it keeps spares
    by the rules `spares(role)`."""

    def __init__(
        self,
        role: str,
        times: Times,
        *,
        spares: Callable[[str], SpareRules],
    ) -> None:
        self.role, self.times = role, times
        self.lives: dict[int, WorkerLife] = {}  # the rank's own, and those that have not ended
        self.current: int | None = None  # the rank's own
        self.spares: list[int] = []  # that have not ended
        self._spare_rules = spares
        self._place: Key | None = None  # of the spares
        self._spare_failures, self._spare_at = 0, -math.inf  # in a row; when the next one may load
        self._closed = False
        self._spares_by = math.inf  # when a rank that ends leaves spares behind
        self._action: Action | None = None  # being carried out
        self._handing: Literal["", "under way", "over"] = ""  # of what was traced
        self._checked = {role}  # roles whose settings were checked since the gang assigned them
        self._check: Check | None = None  # under way
        self._attached_at: float | None = None
        self._unlogged: int | None = None  # a lost worker whose end is not logged yet
        self._count = 0
        self._effects: list[Effect] = []
        self._changed = self._done = False

    # ---- what is known

    @property
    def worker(self) -> WorkerLife | None:
        """The rank's own worker, the newest."""
        return None if self.current is None else self.lives[self.current]

    def status(self) -> WorkerStatus:
        """Its status, for the gang."""
        return self.worker.status() if self.worker else WorkerStatus()

    @property
    def ready_spares(self) -> list[int]:
        """Those that are loaded."""
        lives = self.lives
        return [number for number in self.spares if lives[number].state == "ready" and not lives[number].is_killed]

    # ---- batches

    def _batch(self, now: float) -> Batch:
        self._advance(now)
        effects, self._effects = tuple(self._effects), []
        changed, done, self._changed, self._done = self._changed, self._done, False, False
        changed |= self.worker is not None and self.worker.changed
        for life in self.lives.values():
            life.changed = False
        return Batch(effects, self._deadline(), changed, done)

    def _deadline(self) -> float:
        deadlines = [life.deadline for life in self.lives.values()]
        if self._check:
            limit = self._check.began + self.times.phase_timeout if self._check.tries else math.inf
            deadlines += [self._check.log_at, limit]
        if self._wants_spare and not self._loading_spare:
            deadlines.append(self._spare_at)
        if self.spares and not self._handing:
            deadlines.append(self._spares_by)
        return min(deadlines, default=math.inf)

    # ---- orders

    def carry_out(self, action: Action, now: float) -> Batch:
        """Begins to carry out `action`; a batch says when that is done."""
        action = self._possible(action)
        self._action, self._handing = action, ""
        directive = action.directive
        if self._unlogged is not None and directive.kind != "finished":  # a peer may have ended with the job
            self._effects.append(LogEnd(self._unlogged))
        self._unlogged = None
        match action.kind:
            case "end":
                self._end_current(now)
            case "start":
                self._start(directive, attachment_of(directive), now)
            case "load":
                self._start(directive, None, now)
            case "attach" if self.current is not None:
                self._attach(self.current, attachment_of(directive), now)
            case "detach":
                self._detach(now + self.times.lease)  # as long as a worker may be silent
            case "update":
                self._update(directive)
        return self._batch(now)

    def _possible(self, action: Action) -> Action:
        """What takes the place of `action`, if the worker that it was meant for has ended meanwhile."""
        worker, directive = self.worker, action.directive
        if worker is None or worker.alive:
            return action
        is_other = (worker.generation, worker.join) != (directive.generation, directive.join)
        if action.kind == "update" and directive.kind == "load" and is_other:
            return replace(action, kind="load")
        return replace(action, kind="start") if action.kind == "attach" else action

    def _end_current(self, now: float) -> None:
        worker = self.worker
        if worker and worker.alive:
            flushes = worker.traced and worker.state in ("ready", "running", "draining", "leaving")
            worker.end(now + (TRACE_FLUSH_SECONDS if flushes else 0.0), now)

    def _start(self, directive: Directive, attachment: Attachment | None, now: float) -> None:
        """Starts a worker, or lets a spare take its place."""
        place, self._attached_at = (directive.role, directive.ordinal), None
        if self._place != place:
            self._close_spares()
            self._place = None if attachment is not None and attachment.me.rank == 0 else place
        self._drop(self.current)
        spare = next(iter(self.ready_spares), None)
        if spare is None:
            self.current = self._make(place, attachment, now)
        else:
            self.current = spare
            self.spares.remove(spare)
            self._effects.append(LogTakeOver(spare))
            if attachment:
                self._attach(spare, attachment, now)
        if attachment is None:
            self.lives[self.current].relabel(directive.generation, directive.join)
        self._changed = True

    def _make(self, place: Key, attachment: Attachment | None, now: float, *, check: bool = False) -> int:
        self._count += 1
        number = self._count
        self.lives[number] = WorkerLife(
            attachment, check=check, now=now, do=lambda effect: self._effects.append(Do(number, effect))
        )
        self._effects.append(Make(number, place, attachment, check))
        return number

    def _drop(self, number: int | None) -> None:
        """Forgets a worker that has ended."""
        if number is not None and not self.lives[number].alive:
            del self.lives[number]

    def _attach(self, number: int, attachment: Attachment, now: float) -> None:
        self._attached_at = now
        self.lives[number].attach(attachment)

    def _detach(self, by: float, problem: str = "") -> None:
        if self.worker:
            self.worker.detach(by, problem)

    def _update(self, directive: Directive) -> None:
        worker = self.worker
        if worker is None:
            return
        if directive.kind == "run" and worker.attached:
            worker.update(attachment_of(directive), drain=directive.drain, paused=directive.paused)
        elif directive.kind == "load" and worker.alive:
            worker.relabel(directive.generation, directive.join)

    def check(self, role: str, now: float) -> Batch:
        """Checks the settings for a rank with `role`; without one, only what every role needs. `Refuse` follows if it
        can never work, and otherwise a batch that is done."""
        self._begin_check(role, now)
        return self._batch(now)

    def _begin_check(self, role: str, now: float) -> None:
        self._check = Check(role, began=now, log_at=now + LOG_REPEAT_SECONDS)
        if self._unlogged is not None:
            self._effects.append(LogEnd(self._unlogged))
            self._unlogged = None
        self._drop(self.current)
        self.current, self._changed = self._make((role, 0), None, now, check=True), True

    def detach(self, by: float, problem: str, now: float) -> Batch:
        """The worker leaves its generation because of `problem`, if it has one; it is killed if it has not by then."""
        self._detach(by, problem)
        return self._batch(now)

    def kill(self, number: int, outcome: Outcome, now: float) -> Batch:
        """Kills a worker, which then ends with `outcome` unless it was over before. A check needs no fencing."""
        life = self.lives[number]
        if life.alive and not (life.check and outcome == "stopped"):
            life.kill(outcome)
        return self._batch(now)

    def fail(self, number: int, problem: str, now: float, *, outcome: Outcome = "failed") -> Batch:
        """Kills a worker because of `problem`, a failure of its own."""
        if (life := self.lives[number]).alive:
            life.fail(problem, outcome=outcome)
        return self._batch(now)

    def close(self, now: float) -> Batch:
        """Ends all workers."""
        self._closed, self._check, self._action = True, None, None
        self._end_current(now)
        self._close_spares()
        return self._batch(now)

    def _close_spares(self) -> None:
        for number in self.spares:
            self.lives[number].kill("stopped")

    # ---- events

    def forked(self, number: int, now: float) -> Batch:
        """The process of a worker exists."""
        self.lives[number].forked(now)
        return self._batch(now)

    def not_forked(self, number: int, problem: str, now: float, *, killed: bool) -> Batch:
        """A worker has no process; see `WorkerLife.not_forked`."""
        self.lives[number].not_forked(problem, killed=killed)
        self._ended(number, now)
        return self._batch(now)

    def exiting(self, number: int) -> None:
        """The process of a worker is over; `exited` follows. What is ordered from now on is not the reason."""
        self.lives[number].exiting = True

    def exited(self, number: int, exit: Exit, now: float) -> Batch:
        """The process of a worker has exited."""
        self.lives[number].exited(exit)
        self._ended(number, now)
        return self._batch(now)

    def received(self, number: int, message: FromWorker, now: float) -> Batch:
        """A worker sent `message`."""
        life = self.lives[number]
        before = life.state
        life.received(message, now)
        if number != self.current:
            if before == "loading" and life.state == "ready":
                self._spare_failures = 0
        elif life.state in MET and before == "joining" and self._attached_at is not None:
            self._effects.append(Joined(now - self._attached_at))
            self._attached_at = None
        elif life.state == "ready" and before != "ready" and life.status().outcome == "lost":
            self._effects.append(LogDeparture(number))
        return self._batch(now)

    def dumped(self, number: int, now: float) -> Batch:
        """The stacks of a worker that is to be killed are logged. It may have ended meanwhile."""
        if number in self.lives:
            self.lives[number].dumped()
        return self._batch(now)

    def handed_over(self, now: float) -> Batch:
        """Rank 0 has collected what was traced, or did not in time."""
        self._handing = "over"
        return self._batch(now)

    def suspended(self, seconds: float) -> None:
        """This process, and perhaps its workers, did not run for so long: that counts for no deadline."""
        self._spares_by += seconds
        for life in self.lives.values():
            life.suspended(seconds)
        if self._check:
            check = self._check
            self._check = replace(check, began=check.began + seconds, log_at=check.log_at + seconds)

    def tick(self, now: float) -> Batch:
        """Moves on to `now`."""
        for life in self.lives.values():
            life.tick(now)
        if self._check and self.current is not None:
            taken = now - self._check.began
            if taken >= self.times.phase_timeout:
                self._check = replace(self._check, tries=0, log_at=math.inf)
                self.lives[self.current].kill("silent")  # its stacks are logged first
            elif now >= self._check.log_at:
                self._check = replace(self._check, log_at=now + LOG_REPEAT_SECONDS)
                self._effects.append(LogChecking(taken))
        return self._batch(now)

    def _ended(self, number: int, now: float) -> None:
        life = self.lives[number]
        if number in self.spares:
            self.spares.remove(number)
            del self.lives[number]
            if life.outcome != "stopped":
                assert self._place is not None
                pause = self._spare_rules(self._place[0]).pause * 2 ** min(self._spare_failures, MAX_DOUBLINGS)
                pause = max(MIN_SPARE_PAUSE_SECONDS, min(pause, MAX_BACKOFF_SECONDS))
                self._spare_failures, self._spare_at = self._spare_failures + 1, now + pause
                self._effects.append(LogSpareEnd(life.outcome, life.error, pause))
        elif self._check and number == self.current:
            self._end_check(self._check, life, now)
        elif number == self.current and life.outcome == "lost":
            self._unlogged = number  # a peer may have ended because the job has finished: the next directive tells
        elif number == self.current and life.outcome not in EXPECTED:
            self._effects.append(LogEnd(number))

    def _end_check(self, check: Check, life: WorkerLife, now: float) -> None:
        problem = life.error or life.outcome
        self._drop(self.current)
        self.current, self._changed = None, True
        if not check.tries:
            self._check = None
            limit = f"PHASE_TIMEOUT={self.times.phase_timeout:g} s"
            self._effects.append(Refuse(f"the check of the settings took over {limit}"))
            return
        if life.outcome in UNDECIDED and check.tries > 1:
            self._check = replace(check, tries=check.tries - 1)
            self.current = self._make((check.role, 0), None, now, check=True)
            return
        self._check = None
        if life.outcome == "finished":
            self._checked.add(check.role)
            self._done = self._action is None
        elif life.outcome == "refused":
            self._effects.append(Refuse(life.error))
        elif life.outcome == "killed":
            problem = f"the check of the settings was killed {CHECK_TRIES} times: {problem}"
            advice = "raise the memory limit if memory ran out, or lower what the job needs"
            self._effects.append(Refuse(f"{problem}; {advice}", settings=False))
        else:
            self._effects.append(Refuse(f"the check of the settings failed: {problem}"))

    # ---- what follows

    def _advance(self, now: float) -> None:
        """Goes on with the action, or the check, as far as that is possible; loads a spare if one is wanted."""
        if self._action and self._is_carried_out(self._action, now):
            self._action, self._done = None, True
        if self._wants_spare and not self._loading_spare and now >= self._spare_at:
            assert self._place is not None
            self.spares.append(self._make(self._place, None, now))

    def _is_carried_out(self, action: Action, now: float) -> bool:
        worker, directive = self.worker, action.directive
        match action.kind:
            case "start" | "load":
                return worker is not None and (worker.exists or not worker.alive)
            case "detach":
                return worker is None or not worker.attached
            case "end":
                return self._has_ended(directive, now)
        return True

    def _has_ended(self, directive: Directive, now: float) -> bool:
        if self._check or (self.worker and self.worker.alive):
            return False
        if directive.kind in (*OVER, "leave"):
            if not self._closed:
                self._closed, self._spares_by = True, now + self.times.lease
                self._close_spares()
            if self.spares and now < self._spares_by:
                return False
            if not self._handing:
                self._handing = "under way"
                self._effects.append(HandOver())
            if self._handing != "over":
                return False
        if not self.role and directive.kind in ("run", "stop") and directive.role not in self._checked:
            self._begin_check(directive.role, now)  # the gang waits until this action is carried out
            return False
        return True

    @property
    def _wants_spare(self) -> bool:
        running = self.worker is not None and self.worker.state == "running"
        if self._closed or not running or self._place is None:
            return False
        return len(self.spares) < self._spare_rules(self._place[0]).count

    @property
    def _loading_spare(self) -> bool:
        return any(self.lives[number].state == "loading" for number in self.spares)


def attachment_of(directive: Directive) -> Attachment:
    """The part in a generation that `directive` gives its member. Raises UsageError if it is no member."""
    place, numbers = (directive.role, directive.ordinal), {(role, ordinal): n for role, ordinal, n in directive.joined}
    members = tuple(Peer(*key, rank, numbers.get(key, 0)) for rank, key in enumerate(directive.members))
    me = next((peer for peer in members if (peer.role, peer.ordinal) == place), None)
    if me is None:
        problem = f"rank 0 assigns {name_of(place)}, who is no member of generation {directive.generation}"
        raise UsageError(f"{problem}; run the same version of Rolecall in every rank")
    me = replace(me, join=directive.join)
    members = tuple(me if peer.rank == me.rank else peer for peer in members)
    lost = tuple(peer.name for peer in members if (peer.role, peer.ordinal) in directive.lost)
    return Attachment(directive.generation, me, members, lost)
