"""How far training has come: metrics, the rows of the run's history, log lines, and the time left."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.watchdog import Watchdog
from rolecall.declare.spec import Job
from rolecall.declare.task import Peer
from rolecall.record.history import MAX_STEP, Goal, Point, Row, Stall

Change = Literal["joined", "lost"]


class Supervision:
    """What a worker reports to its supervisor. This base class reports to nobody; `WorkerEnd` sends messages."""

    def require_alive(self) -> None:
        """Ends this thread if its worker has ended; with a process, all threads end."""

    def report_step(self, step: int) -> None:
        """`step` was made."""

    def record(self, row: Row) -> None:
        """A row for the run's history."""

    def report_loaded(self) -> None:
        """This worker, which has no generation yet, has made its role's object, or needs its peers for that."""

    def report_connected(self, generation: int, join: int) -> None:
        """This worker has met its peers of `generation`, as its part number `join`."""

    def report_detached(self, generation: int, join: int, problem: str = "") -> None:
        """This worker is no part of `generation` any more: as ordered, or because of `problem`."""

    def report_lost(self, peer: Peer, replace: bool = False) -> None:
        """Rank 0 found a peer dead or silent; with `replace`, it wants another worker in its place."""

    def report_stuck(self, problem: str) -> None:
        """This process is stuck: its supervisor logs its stacks, and ends it."""

    def conclude(self, outcome: Literal["finished", "drained"], step: int, summary: dict[str, Any]) -> None:
        """This process ends with `outcome`, whatever its function does."""

    def fail(self, problem: str | BaseException) -> None:
        """This process ends as one whose function raised `problem`, or a ProgramError with that text."""

    def refuse_drain(self) -> None:
        """The drain's checkpoint could not be written."""


@dataclass(frozen=True)
class TrainingStarted:
    """The arguments of `Context.start`; `steps` is the number of the last step."""

    step: int
    done: float = 0
    total: float | None = None
    goal: float | None = None
    steps: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLogged:
    """The arguments of `Context.log`. Without a `step`, it is the newest. `ended`: the step is over, and may log a
    line."""

    step: int | None = None
    done: float | None = None
    loss: float | None = None
    score: float | None = None
    spread: tuple[float, float] | None = None
    epoch: int | None = None
    message: str = ""
    ended: bool = True
    values: dict[str, float] = field(default_factory=dict)

    @property
    def has_progress(self) -> bool:
        """Whether it says how far training is."""
        return (self.score, self.loss, self.done) != (None, None, None)


ProgressEvent = TrainingStarted | StepLogged


class Progress:
    """Rank 0's account of the training. Safe to use from several threads."""

    def __init__(
        self, settings: Settings, metrics: Any, supervision: Supervision, watchdog: Watchdog, job: Job | None
    ) -> None:
        self.settings, self.metrics, self.supervision, self._watchdog = settings, metrics, supervision, watchdog
        self.unit, self.label = (job.unit, job.score) if job else ("steps", "score")
        self.logger = telemetry.log()
        self.done = 0.0
        self._counts_work = False  # the job gives `done`; otherwise it is the number of steps
        self._earlier_seconds = 0.0  # of training, before this generation
        self._lock = threading.RLock()
        self._started: float | None = None
        self._recorded: float | None = None  # when the first point was recorded, or training began
        self._total: float | None = None  # work at the end
        self._steps: int | None = None  # and steps
        self._first_step = self._step = 0
        self._first_done = 0.0
        self._line_at = self._line_done = 0.0  # of the last log line
        self._line_step = 0
        self._loss = self._work = 0.0  # the loss, summed over the work since the last line
        self._epoch: int | None = None
        self._score: float | None = None  # logged since the last line
        self._message = ""
        self._values: dict[str, float] = {}  # that have no metric of their own
        declared = (*telemetry.WORKER, *(job.metrics if job else ()))
        self._gauges = {metric.name for metric in declared if metric.kind == "gauge" and not metric.labels}

    def resume(self, step: int, done: float, seconds: float) -> None:
        """Continues after `step`, with `done` units of work and `seconds` of training behind it."""
        self._step, self.done, self._earlier_seconds = step, done, seconds
        self._counts_work = done != step

    @property
    def started(self) -> bool:
        """Whether training has begun."""
        return self._started is not None

    @property
    def total_seconds(self) -> float:
        """Seconds of training, over all generations."""
        return self._earlier_seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def take(self, event: ProgressEvent) -> None:
        """Applies an event of this rank or of another one."""
        if isinstance(event, TrainingStarted):
            self._start(event)
        else:
            self._log(event)

    def _start(self, event: TrainingStarted) -> None:
        steps = {} if event.steps is None else {"steps": event.steps}
        self.logger.info("training", step=event.step, **steps, **event.facts)
        telemetry.init_labels(self.metrics.stalled_seconds, get_args(Change))
        with self._lock:  # logs of other ranks come meanwhile
            self._started = self._recorded = self._line_at = time.monotonic()
            self._first_done = self.done = self._line_done = event.done
            self._step = self._first_step = self._line_step = event.step
            self._total, self._steps = event.total, event.steps
        if event.goal is not None:
            goal = float(event.goal)  # it may be numpy's or torch's
            self.metrics.goal.set(goal)
            if math.isfinite(goal):
                self.supervision.record(Goal(goal))

    def _log(self, event: StepLogged) -> None:
        with self._lock:
            step = self._step if event.step is None else event.step
            for name, value in event.values.items():
                self._set(name, step, value)
            if event.epoch is not None:
                self._epoch = event.epoch
                self.metrics.epoch.set(event.epoch)
                self._record("epoch", step, event.epoch)
            if event.score is not None:
                self._score = event.score
                self.metrics.score.set(event.score)
                self._record("score", step, event.score)
                if event.spread is not None:  # after the score, with which the history keeps it
                    self._record("score_low", step, event.spread[0])
                    self._record("score_high", step, event.spread[1])
            if event.loss is not None:
                work = 1.0 if event.done is None else event.done - self.done
                self._loss, self._work = self._loss + event.loss * work, self._work + work
            self._message = event.message or self._message
            if event.done is not None:  # the score of an earlier step may come later
                self._counts_work = True
                self._advance(step, event.done)
                if event.ended:
                    self._end_step(step)

    def _set(self, name: str, step: int, value: float) -> None:
        gauge = getattr(self.metrics, name, None) if name in self._gauges else None
        if gauge is None:
            gauge, self._values[name] = self.metrics.value.labels(name), float(value)
        gauge.set(value)
        self._record(name, step, value)

    def _record(self, name: str, step: int, value: float) -> None:
        """Records a point of the curve `name`. JSON has no other numbers than finite ones."""
        now = time.monotonic()
        self._recorded = now if self._recorded is None else self._recorded
        if math.isfinite(value) and 0 <= step <= MAX_STEP:
            seconds = max(0.0, now - self._recorded)
            self.supervision.record(Point(name, step, float(value), seconds))

    def complete(self, step: int) -> None:
        """`step` was made, whatever was logged of it."""
        with self._lock:
            if not self._counts_work and self.done < step:
                self._advance(step, step)
            elif step > self._step:
                self._reach(step)
            self._end_step(step)

    def stalled(self, step: int, change: Change, seconds: float) -> None:
        """`step`, in which members joined or were lost, took `seconds` longer than usual."""
        self.metrics.stalled_seconds.labels(change).inc(seconds)
        self.supervision.record(Stall(change, seconds))

    def _advance(self, step: int, done: float) -> None:
        self.metrics.done.inc(max(0.0, done - self.done))
        self.done = done
        self._record("done", step, done)
        self._reach(step)

    def _reach(self, step: int) -> None:
        self._step = step
        self.metrics.step.set(step)
        self._watchdog.complete(step)
        self.supervision.report_step(step)  # rank 0's progress, whichever rank made the step
        if self._seconds_left is not None:
            self.metrics.left_seconds.set(self._seconds_left)

    @property
    def _seconds_left(self) -> float | None:
        """Seconds until the work, or else the last step, is done, at the rate of this generation."""
        if self._started is None:
            return None
        first, now, last = self._first_done, self.done, self._total
        if last is None:
            first, now, last = self._first_step, self._step, self._steps
        if last is None or now <= first:
            return None
        return (last - now) * (time.monotonic() - self._started) / (now - first)

    def _end_step(self, step: int) -> None:
        """Logs a line every LOG_INTERVAL steps."""
        if step // self.settings.log_interval <= self._line_step // self.settings.log_interval:
            return
        now, work = time.monotonic(), self.done - self._line_done
        parts = [] if self._epoch is None else [f"Epoch {self._epoch}"]
        parts.append(f"step {step}")
        if self._work:
            mean = self._loss / self._work
            self.metrics.loss.set(mean)
            self._record("loss", step, mean)
            parts.append(f"loss {mean:.4f}")
        if self._score is not None:
            parts.append(f"{self.label} {self._score:.6g}")
        rate = {f"{self.unit}_per_s": round(work / max(now - self._line_at, 1e-9))}
        left = {} if self._seconds_left is None else {"left_s": round(self._seconds_left)}
        values = {name: float(f"{value:.6g}") for name, value in self._values.items()}
        self.logger.info(self._message or "\t".join(parts), **values, **rate, **left)
        self._loss, self._work, self._score, self._message = 0.0, 0.0, None, ""
        self._line_at, self._line_done, self._line_step = now, self.done, step
