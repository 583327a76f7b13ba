"""How far training has come: one place for its metrics, its history, its log lines and its time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.spec import Job

Curve = Literal["start", "train", "goal", "score", "low", "high", "loss", "done"]


class Supervision:
    """What a worker tells its supervisor; this base class tells nobody."""

    def report_step(self, step: int) -> None:
        """`step` was made."""

    def record(self, kind: Curve, step: int, value: float) -> None:
        """A value for the run's history."""

    def value(self, name: str, step: int, value: float) -> None:
        """A value that the job logs under a name of its own, for the run's sinks."""

    def report_lost(self, role: str, ordinal: int) -> None:
        """Rank 0 found a peer dead or silent."""

    def report_stuck(self, problem: str) -> None:
        """This process takes too long, as `problem` says: its supervisor logs its stacks, and ends it."""

    def conclude(self, outcome: Literal["finished", "drained"], step: int, summary: dict[str, Any]) -> None:
        """This process ends with `outcome`, whatever its function does."""

    def fail(self, problem: str) -> None:
        """This process ends, whatever its function does, as one that raised."""

    def refuse_drain(self, why: str) -> None:
        """The drain's checkpoint could not be written."""


class Progress:
    """Rank 0's account of the training. Safe to use from several threads."""

    def __init__(self, settings: Settings, metrics: Any, supervision: Supervision, job: Job | None,
                 reached: Callable[[int], None] = lambda step: None) -> None:  # fmt: skip
        self.settings, self.metrics, self.supervision = settings, metrics, supervision
        self._reached = reached
        self.unit, self.label = (job.unit, job.score) if job else ("steps", "score")
        self.logger = telemetry.log()
        self.done = 0.0
        self._counted = False  # the job itself gives `done`; otherwise it is the number of steps
        self._seconds = 0.0  # of training, before this generation
        self._lock = threading.RLock()
        self._started: float | None = None
        self._total: float | None = None  # work at the end
        self._steps: int | None = None  # and steps
        self._first_step = 0
        self._step = 0
        self._first = self._logged_done = 0.0
        self._logged_at = 0.0
        self._logged_step = 0
        self._loss = self._work = 0.0  # the loss, summed over the work since the last line
        self._epoch: int | None = None
        self._score: float | None = None  # logged since the last line
        self._message = ""
        self._values: dict[str, float] = {}  # that have no metric of their own
        declared = (*telemetry.WORKER, *(job.metrics if job else ()))
        self._gauges = {metric.name for metric in declared if metric.kind == "gauge" and not metric.labels}

    def resume(self, step: int, done: float, seconds: float) -> None:
        """Continues after `step`, with `done` units of work and `seconds` of training behind it."""
        self._step, self.done, self._seconds = step, done, seconds
        self._counted = done != step

    @property
    def started(self) -> bool:
        """Whether training has begun."""
        return self._started is not None

    @property
    def total_seconds(self) -> float:
        """Seconds of training, over all generations."""
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def start(self, step: int, done: float, total: float | None, goal: float | None, steps: int | None = None,
              **facts: Any) -> None:  # fmt: skip
        """See `Context.start`; `steps` is the number of the last one."""
        self.logger.info("training", step=step, **({} if steps is None else {"steps": steps}), **facts)
        self.supervision.record("train", step, 0)
        if goal is not None:
            self.metrics.goal.set(goal)
            self.supervision.record("goal", step, goal)
        self._started = self._logged_at = time.monotonic()
        self._first = self.done = self._logged_done = done
        self._step = self._first_step = self._logged_step = step
        self._total, self._steps = total, steps

    def log(self, step: int | None, done: float | None, loss: float | None, score: float | None, epoch: int | None,
            message: str, spread: tuple[float, float] | None = None, ended: bool = True,
            **values: float) -> None:  # fmt: skip
        """See `Context.log`; without `step`, the newest. `ended` says that the step is over, which may print a line."""
        with self._lock:
            step = self._step if step is None else step
            for name, value in values.items():
                gauge = getattr(self.metrics, name, None) if name in self._gauges else None
                if gauge is None:
                    gauge, self._values[name] = self.metrics.value.labels(name), float(value)
                gauge.set(value)
                self._pass_on(name, step, value)
            if epoch is not None:
                self._epoch = epoch
                self._pass_on("epoch", step, epoch)
                self.metrics.epoch.set(epoch)
            if score is not None:
                self._score = score
                self.metrics.score.set(score)
                self.supervision.record("score", step, score)
                if spread is not None:  # after the score, with which the history keeps it
                    self.supervision.record("low", step, spread[0])
                    self.supervision.record("high", step, spread[1])
            if loss is not None:
                work = 1.0 if done is None else done - self.done
                self._loss, self._work = self._loss + loss * work, self._work + work
            self._message = message or self._message
            if done is not None:  # the score of an earlier step may come later
                self._counted = True
                self._advance(step, done)
                if ended:
                    self._end(step)

    def _pass_on(self, name: str, step: int, value: float) -> None:
        if self.settings.sinks != "none":
            self.supervision.value(name, step, value)

    def _advance(self, step: int, done: float) -> None:
        self.metrics.done.inc(max(0.0, done - self.done))
        self.done = done
        self.supervision.record("done", step, done)
        self._reach(step)

    def complete(self, step: int) -> None:
        """`step` was made, whatever was logged of it."""
        with self._lock:
            if not self._counted and self.done < step:
                self._advance(step, step)
            elif step > self._step:
                self._reach(step)
            self._end(step)

    def _reach(self, step: int) -> None:
        self._step = step
        self.metrics.step.set(step)
        self._reached(step)
        self.supervision.report_step(step)  # rank 0's progress, whichever rank made the step
        if self._left is not None:
            self.metrics.left_seconds.set(self._left)

    @property
    def _left(self) -> float | None:
        """Seconds until the work, or else the last step, is done, at the rate of this generation."""
        if self._started is None:
            return None
        first, now, last = self._first, self.done, self._total
        if last is None:
            first, now, last = self._first_step, self._step, self._steps
        if last is None or now <= first:
            return None
        return (last - now) * (time.monotonic() - self._started) / (now - first)

    def _end(self, step: int) -> None:
        """The end of a step: a line every LOG_INTERVAL steps."""
        if step // self.settings.log_interval <= self._logged_step // self.settings.log_interval:
            return
        now, work = time.monotonic(), self.done - self._logged_done
        parts = [] if self._epoch is None else [f"Epoch {self._epoch}"]
        parts.append(f"step {step}")
        if self._work:
            mean = self._loss / self._work
            self.metrics.loss.set(mean)
            self.supervision.record("loss", step, mean)
            parts.append(f"loss {mean:.4f}")
        if self._score is not None:
            parts.append(f"{self.label} {self._score:.6g}")
        rate = {f"{self.unit}_per_s": round(work / max(now - self._logged_at, 1e-9))}
        left = {} if self._left is None else {"left_s": round(self._left)}
        values = {name: float(f"{value:.6g}") for name, value in self._values.items()}
        self.logger.info(self._message or "\t".join(parts), **values, **rate, **left)
        self._loss, self._work, self._score, self._message = 0.0, 0.0, None, ""
        self._logged_at, self._logged_done, self._logged_step = now, self.done, step
