"""How far training has come: one place for its metrics, its history, its log lines and its time left."""

from __future__ import annotations

import threading
import time
from typing import Any, Literal

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.job.task import Outcome

Curve = Literal["start", "train", "goal", "score", "loss", "done"]


class Supervision:
    """What a worker tells its supervisor; this base class tells nobody."""

    def report_step(self, step: int) -> None:
        """`step` was made."""

    def record(self, kind: Curve, step: int, value: float) -> None:
        """A value for the run's history."""

    def report_lost(self, role: str, ordinal: int) -> None:
        """Rank 0 found a peer dead or silent."""

    def refuse_drain(self, why: str) -> None:
        """The drain's checkpoint could not be written."""

    def conclude(self, outcome: Outcome) -> None:
        """This process ends with `outcome`, whatever its function does."""


class Progress:
    """Rank 0's account of the training. Safe to use from several threads."""

    def __init__(self, settings: Settings, metrics: Any, supervision: Supervision, unit: str) -> None:
        self.settings, self.metrics, self.supervision, self.unit = settings, metrics, supervision, unit
        self.logger = telemetry.log()
        self.seconds = 0.0  # of training, before this generation
        self._lock = threading.RLock()
        self._started: float | None = None
        self._total: float | None = None
        self._first = self._done = self._logged_done = 0.0
        self._logged_at = 0.0
        self._logged_step = 0
        self._loss = 0.0  # summed over the work since the last line
        self._epoch: int | None = None

    @property
    def total_seconds(self) -> float:
        """Seconds of training, over all generations."""
        return self.seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def start(self, step: int, done: float, total: float | None, goal: float | None, **facts: Any) -> None:
        """See `Context.start`."""
        self.logger.info("training", step=step, **facts)
        self.supervision.record("train", step, 0)
        if goal is not None:
            self.metrics.goal.set(goal)
            self.supervision.record("goal", step, goal)
        self._started = self._logged_at = time.monotonic()
        self._first = self._done = self._logged_done = done
        self._logged_step, self._total = step, total

    def log(self, step: int, done: float | None, loss: float | None, score: float | None, epoch: int | None,
            message: str, **values: float) -> None:  # fmt: skip
        """See `Context.log`."""
        with self._lock:
            for name, value in values.items():
                getattr(self.metrics, name).set(value)
            if epoch is not None:
                self._epoch = epoch
                self.metrics.epoch.set(epoch)
            if score is not None:
                self.metrics.score.set(score)
                self.supervision.record("score", step, score)
            if done is not None:  # the score of an earlier step may come later
                self._advance(step, done, loss)
                if step // self.settings.log_interval > self._logged_step // self.settings.log_interval:
                    self._line(step, loss is not None, message)

    def _advance(self, step: int, done: float, loss: float | None) -> None:
        self._loss += (loss or 0.0) * (done - self._done)
        self.metrics.step.set(step)
        self.metrics.done.inc(done - self._done)
        self._done = done
        self.supervision.record("done", step, done)
        self.supervision.report_step(step)  # rank 0's progress, whichever rank made the step
        if self._left is not None:
            self.metrics.left_seconds.set(self._left)

    @property
    def _left(self) -> float | None:
        """Seconds until the work is done, at the rate of this generation."""
        if self._total is None or self._started is None or self._done <= self._first:
            return None
        return (self._total - self._done) * (time.monotonic() - self._started) / (self._done - self._first)

    def _line(self, step: int, with_loss: bool, message: str) -> None:
        now, work = time.monotonic(), self._done - self._logged_done
        parts = [] if self._epoch is None else [f"Epoch {self._epoch}"]
        parts.append(f"step {step}")
        if with_loss and work:
            mean = self._loss / work
            self.metrics.loss.set(mean)
            self.supervision.record("loss", step, mean)
            parts.append(f"loss {mean:.4f}")
        rate = {f"{self.unit}_per_s": round(work / max(now - self._logged_at, 1e-9))}
        left = {} if self._left is None else {"left_s": round(self._left)}
        self.logger.info(message or "\t".join(parts), **rate, **left)
        self._loss, self._logged_at, self._logged_done, self._logged_step = 0.0, now, self._done, step
