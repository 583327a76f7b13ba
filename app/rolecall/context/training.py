"""Rank 0's training: where it resumes, its steps, what it logs, and its checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.context.pace import in_phase
from rolecall.context.peers import S
from rolecall.context.saving import Saving, ShardedValue, State
from rolecall.declare.plain import is_stateful, require_plain
from rolecall.declare.preflight import NOT_RESTORED
from rolecall.errors import UsageError
from rolecall.record import rundir
from rolecall.record.recorder import recorder

LAST_TRIES, LAST_PAUSE = 5, 5.0  # of the last checkpoint, and the seconds between two of them


@dataclass
class Training(Saving[S]):
    """Restores, makes steps, and says how they go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.finished: dict[str, Any] | None = None  # the summary, once `finish` was called
        self._begun = False  # the run's history knows of this generation
        self._looked = False  # for a checkpoint to resume from
        self._redo = False
        self._reported_ns = 0  # when this rank, other than rank 0, last reported a step

    # ---- steps

    @in_phase("restoring")
    def restore(self, state: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> State:
        """Returns `state` as the newest checkpoint has it, or as it is where there is none; `steps` and `finish` save
        it from now on. Values with `state_dict` and `load_state_dict` (torch.distributed.checkpoint's Stateful:
        modules, optimizers, objects of the job's own) are loaded in place, the others (numbers, strings, tensors, and
        lists, sets and dicts of those) are replaced. `chosen` are the values of pinned settings whose default depends
        on what the job has been given to work with: the checkpoint holds them in place of the settings' own.

        Raises UsageError for other values, for a checkpoint that does not fit, that was made with other pinned
        settings, or where none of the checkpoints can be read.
        """
        self._state, self._chosen = dict(state), dict(chosen or {})
        for name in self._chosen:
            if self.job is not None and name not in self.job.pinned:
                raise UsageError(f"restore(chosen={{{name!r}: ...}}): is no pinned setting; add it to Job(pinned=...)")
        for name, value in state.items():
            require_plain(name, value.state_dict() if is_stateful(value) else value)
        snapshot = self.snapshot()
        for name, value in self._state.items() if snapshot else ():
            assert snapshot is not None
            if name not in snapshot.state:
                if "done" not in snapshot.about:  # of format 1, when jobs named their values otherwise
                    problem = f"{snapshot.path.name}: was written by an earlier version, without {name}"
                    raise UsageError(f"{problem}; finish the run with that version, or set another CHECKPOINT_DIR")
                self.logger.warning("the checkpoint lacks a value, which begins anew", value=name)
                continue
            saved = snapshot.state[name]
            if is_stateful(value):
                advice = "restore what the job was trained with, or set another CHECKPOINT_DIR"
                with UsageError.wrap(f"{snapshot.path.name}: {name} does not fit this program", advice=advice):
                    value.load_state_dict(saved)
            else:
                self._state[name] = saved
        return self._state

    @in_phase("restoring")
    def snapshot(self) -> Snapshot | None:
        """The newest checkpoint, or None. Raises UsageError where it was made with other pinned settings, or where
        none of the checkpoints can be read."""
        self._begun, self._looked, snapshot = True, True, self.require_checkpoints().newest(self._load)
        if snapshot is not None:
            self._step, about = snapshot.step, snapshot.about
            self.progress.resume(self._step, float(about.get("done", 0.0)), float(about.get("seconds", 0.0)))
            self.logger.info("resumed", file=snapshot.path.name, step=snapshot.step)
        return snapshot

    def _load(self, snapshot: Snapshot) -> Snapshot:
        """Has the ranks that hold shares of the state's values read them. Raises CheckpointError."""
        advice = "finish the run with that version, or set another CHECKPOINT_DIR"
        snapshot.require_layout(self.layout, advice)
        snapshot.require_settings(self.settings, self._chosen)
        for name, value in (self._state or {}).items():
            if isinstance(value, ShardedValue) and name in snapshot.shards:
                value.load(snapshot.path.stem, snapshot.shards[name])
        return replace(snapshot, shards={
            name: files for name, files in snapshot.shards.items()
            if not isinstance((self._state or {}).get(name), ShardedValue)
        }).whole()  # fmt: skip

    def steps(self, total: int | None = None, state: State | None = None, *, until: Callable[[], bool] | None = None,
              settled: Callable[[], bool] | None = None, work: float | None = None, goal: float | None = None,
              **facts: Any) -> Iterator[int]:  # fmt: skip
        """Yields the numbers of the steps to make: from the one after the checkpoint that `restore` returned to
        `total`, or `until()` is true. Before each, it writes a checkpoint of `state` (by default, that of `restore`)
        where one is due, and ends the function by raising `Drained` where a drain is ordered. A `break` ends the loop
        with the step under way. Once a drain is ordered, steps go on until `settled()` is true, if it is given: the
        caller bounds that by DRAIN_TIMEOUT.

        `work` is the work of the whole training, in the job's unit, from which the time left follows; `goal` the score
        to reach; `facts` are for the log.

        Raises UsageError without a call of `restore` (or `snapshot`) before: each generation would begin at step 1.
        """
        self.require_checkpoints()  # at rank 0 only
        if not self._looked:
            raise UsageError(NOT_RESTORED)
        self._state = state if state is not None else self._state or {}
        if not self.progress.started:
            self.start(self._step, done=self.progress.done, total=work, goal=goal, steps=total, **facts)
        while (total is None or self._step < total) and not (until is not None and until()):
            draining = self.draining
            if self.due and (settled is None or not draining or settled()):
                self.save(drain=draining)
            self._redo, self._stepping = False, True
            try:
                with self.pace.step(self._step + 1):
                    yield self._step + 1
            finally:  # also after a `break`
                self._stepping = False
                if not self._redo:
                    self._step += 1
            if not self._redo:
                self.progress.complete(self._step)
        self.pace.idle()

    def redo(self) -> None:
        """The step under way is made again: `steps` yields its number once more."""
        self._redo = True

    def start(self, step: int, *, done: float = 0, total: float | None = None, goal: float | None = None,
              **facts: Any) -> None:  # fmt: skip
        """Training begins after `step`, with `done` units of work behind it and `total` at its end, towards a score of
        `goal`. `facts` are for the log. `steps` does so itself.
        """
        if self.rank == 0 and not self._begun:  # otherwise `snapshot` has done so
            self._begun = True
            self.supervision.record("start", step, self.generation)
        self.pace.ready()
        self._progress("start", step, done=done, total=total, goal=goal, **facts)

    def log(self, step: int | None = None, *, done: float | None = None, loss: float | None = None,
            score: float | None = None, spread: tuple[float, float] | None = None, epoch: int | None = None,
            message: str = "", **values: float) -> None:  # fmt: skip
        """Says how training stands after `step`, by default the one under way: metrics, the run's history, and a log
        line every LOG_INTERVAL steps.

        `done` is the work so far, in the job's unit, from which rate and time left follow (of a job that never gives
        it, the number of steps); `loss` the mean loss over the work since the last call; `score` a point of the curve,
        with `spread` the lowest and the highest of what it is a mean of, which are drawn as a band; `epoch` counts from
        1. `values` are gauges: the job's own by their metrics' names, others as `rolecall_value`. A line begins with
        `message`, if one is given. `step` may be an earlier one, without `done`, whose score is known only now.
        """
        if step is None and self.rank == 0:
            step = self._step + self._stepping
        done, loss, score, low, high = map(_number, (done, loss, score, *(spread or (None, None))))
        if done is not None and step is not None and self.rank:  # rank 0's progress does so itself
            self.report_step(step)
        self._progress("log", step, done=done, loss=loss, score=score, epoch=epoch, message=message,
                       **({} if low is None or high is None else {"spread": (low, high)}),
                       **({"ended": False} if self._stepping else {}), **values)  # fmt: skip

    def report_step(self, step: int) -> None:
        """Tells the supervisor that this rank has made `step`: progress, after which earlier failures do not count."""
        self.pace.ready()
        self.supervision.report_step(step)
        recorder.since(self._reported_ns, "step", step=step)
        self._reported_ns = time.monotonic_ns()

    def _progress(self, method: str, *args: Any, **values: Any) -> None:
        if self.rank == 0:
            getattr(self.progress, method)(*args, **values)
        else:
            self._connected.forward(self, method, *args, **values)

    def require_finite(self, *values: float, hint: str) -> None:
        """Raises FloatingPointError, and counts it, where a loss or the norm of its gradient is not finite."""
        if not all(map(math.isfinite, values)):
            self.metrics.nonfinite_losses.inc()
            raise FloatingPointError(hint)

    # ---- the end

    def finish(self, message: str = "Finished", *, step: int | None = None, state: State | None = None,
               **summary: Any) -> dict[str, Any]:  # fmt: skip
        """Writes the last checkpoint and logs `message`; returns the summary, with `seconds` of training and whether
        the checkpoint was `saved`. A function of rank 0 that returns a summary without this call has it made.
        """
        step = self._step + self._stepping if step is None else step
        self._stepping, self._redo = False, True  # the loop of `steps`, if it is left by this, has made its step
        self.progress.complete(step)
        self.pace.idle()
        saved = {} if state is None and self._state is None else {"saved": self._write_last(step, state)}
        seconds = self.progress.total_seconds
        self.logger.info(message, steps=step, seconds=round(seconds, 1))
        self._step, self.finished = step, {**summary, "seconds": seconds, **saved}
        return self.finished

    def _write_last(self, step: int, state: State | None) -> bool:
        """Writes the last checkpoint, which no later one makes up for: again where it could not be written."""
        for _ in range(LAST_TRIES - 1):
            if self._write(step, state, drain=False):
                return True
            time.sleep(LAST_PAUSE)  # a period; the tries are bounded
        return self._write(step, state, drain=False)

    def conclude(self, summary: dict[str, Any] | None) -> None:
        """Ends rank 0's process at once, from any thread: as if its function had returned `summary`, or, where that is
        None, as after a drain. For a function that cannot be made to return.
        """
        self.supervision.conclude("drained" if summary is None else "finished", self._step, summary or {})

    def fail(self, problem: str) -> None:
        """Ends this rank's process at once, from any thread, as if its function had raised ProgramError(`problem`). For
        a function that cannot be made to return.
        """
        self.supervision.fail(problem)

    @property
    def step(self) -> int:
        """The newest step that was made, or resumed from."""
        return self._step

    @property
    def files(self) -> Path:
        """The directory for files of the job's own, under this rank's CHECKPOINT_DIR. Raises UsageError where it cannot
        be made."""
        directory = self.settings.checkpoint_dir.absolute() / rundir.FILES
        with UsageError.wrap(f"CHECKPOINT_DIR={self.settings.checkpoint_dir}: cannot be written", OSError):
            directory.mkdir(parents=True, exist_ok=True)
        return directory


def _number(value: Any) -> float | None:
    """A tensor, too, as a float: one with its graph would keep all of that in memory."""
    return None if value is None else float(value.detach() if hasattr(value, "detach") else value)
