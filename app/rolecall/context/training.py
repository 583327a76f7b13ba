"""Rank 0's steps and checkpoints: where training resumes, when a checkpoint is due, and how training ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.checkpoint.saving import Saver, State
from rolecall.checkpoint.sharded import Sharded
from rolecall.context.group import Group
from rolecall.context.progress import Change, Progress, StepLogged, TrainingStarted
from rolecall.declare.plain import is_stateful, require_plain
from rolecall.errors import Drained, UsageError
from rolecall.messages.codec import encode
from rolecall.record import rundir
from rolecall.record.recorder import recorder

LAST_CHECKPOINT_TRIES = 5
LAST_CHECKPOINT_PAUSE_SECONDS = 5.0
MAX_RESULT_BYTES = 32_000  # a summary travels in a heartbeat
NOT_RESTORED = (
    "steps() would begin at step 1 again after each restart: write `state = context.restore({...})` before the loop, "
    "with what it changes, or `context.restore({})` if it changes nothing"
)
RESULT = "return a few numbers and strings by name"


class Training:
    """The steps of one worker. Only rank 0 has a `saver`; the other ranks forward what they log to it."""

    def __init__(self, group: Group, progress: Progress, saver: Saver | None) -> None:
        self.settings, self.job, self.saver = group.settings, group.job, saver
        self.logger = telemetry.log()
        self.step = 0  # the newest that was made, or resumed from
        self.finished: dict[str, Any] | None = None  # the summary, once `finish` was called
        self._saw_drain = False  # the role's function was told of the drain
        self.layout = group.job.layout if group.job else 1
        self._group, self._progress = group, progress
        self._watchdog, self._supervision, self._drain_ordered = group.watchdog, group.supervision, group.drain_ordered
        self._state: State | None = None  # what `steps` saves
        self._chosen: dict[str, Any] = {}  # values of pinned settings that have none of their own
        self._stepping = False  # the step after `step` is under way
        self._redo = False
        self._start_recorded = False  # the run's history knows of this generation
        self._looked_for_checkpoint = False
        self._reported_ns = 0  # when this rank, other than rank 0, last reported a step

    def require_saver(self) -> Saver:
        """Writes and reads the run's checkpoints. Raises UsageError at another rank than rank 0."""
        if self.saver is None:
            raise UsageError("only rank 0 reads and writes checkpoints")
        return self.saver

    @property
    def _step_of_state(self) -> int:
        """The step that the state belongs to: within a step, the state is that after it."""
        return self.step + self._stepping

    # ---- the state

    def restore(self, state: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> State:
        """See `Context.restore`."""
        with self._watchdog.phase("restoring"):
            self._state, self._chosen = dict(state), dict(chosen or {})
            for name in self._chosen:
                if self.job is not None and name not in self.job.pinned:
                    problem = f"restore(chosen={{{name!r}: ...}}): is no pinned setting"
                    raise UsageError(f"{problem}; add it to Job(pinned=...)")
            for name, value in state.items():
                require_plain(name, value.state_dict() if is_stateful(value) else value)
            if snapshot := self.snapshot():
                self._load(snapshot, self._state)
            return self._state

    def _load(self, snapshot: Snapshot, state: State) -> None:
        for name, value in state.items():
            if name not in snapshot.state:
                if "done" not in snapshot.about:  # of format 1, when jobs named their values otherwise
                    problem = f"{snapshot.path.name}: was written by an earlier version, without {name}"
                    raise UsageError(f"{problem}; finish the run with that version, or set another CHECKPOINT_DIR")
                self.logger.warning("the checkpoint lacks a value, which begins anew", value=name)
            elif is_stateful(value):
                advice = "restore what the job was trained with, or set another CHECKPOINT_DIR"
                with UsageError.wrap(f"{snapshot.path.name}: {name} does not fit this program", advice=advice):
                    value.load_state_dict(snapshot.state[name])
            else:
                state[name] = snapshot.state[name]

    def snapshot(self) -> Snapshot | None:
        """See `Context.snapshot`."""
        checkpoints = self.require_saver().checkpoints
        with self._watchdog.phase("restoring"):
            self._start_recorded = self._looked_for_checkpoint = True
            snapshot = checkpoints.newest(self._load_shares)
        if snapshot is not None:
            self.step, about = snapshot.step, snapshot.about
            self._progress.resume(self.step, float(about.get("done", 0.0)), float(about.get("seconds", 0.0)))
            self.logger.info("resumed", file=snapshot.path.name, step=snapshot.step)
        return snapshot

    def _load_shares(self, snapshot: Snapshot) -> Snapshot:
        """Has the ranks that hold shares of the state's values read them. Raises CheckpointError."""
        snapshot.require_layout(self.layout, "finish the run with that version, or set another CHECKPOINT_DIR")
        snapshot.require_settings(self.settings, self._chosen)
        sharded = {name: value for name, value in (self._state or {}).items() if isinstance(value, Sharded)}
        for name, value in sharded.items():
            if name in snapshot.shards:
                value.load(snapshot.path.stem, snapshot.shards[name])
        return replace(snapshot, shards={n: files for n, files in snapshot.shards.items() if n not in sharded}).whole()

    # ---- checkpoints

    @property
    def draining(self) -> bool:
        """See `Context.draining`."""
        return self._drain_ordered.is_set()

    def see_drain(self) -> bool:
        """Whether a drain is ordered. A function that returns once it has seen that ends because of the drain."""
        self._saw_drain = self.draining
        return self._saw_drain

    @property
    def due(self) -> bool:
        """See `Context.due`."""
        return self.draining or self.require_saver().due(self.settings.checkpoint_interval)

    def save(self, step: int | None = None, state: State | None = None, drain: bool | None = None) -> None:
        """See `Context.save`."""
        ending = self.draining if drain is None else drain
        step = self._step_of_state if step is None else step
        problem = self._write(step, state, wait=ending)
        if not ending:
            return
        if not problem:
            raise Drained(step)
        self._drain_ordered.clear()
        self._saw_drain = False
        self._supervision.refuse_drain(problem)

    def _write(self, step: int, state: State | None, wait: bool) -> str:
        """Writes a checkpoint. Returns the problem if it cannot be written."""
        saver = self.require_saver()
        pinned = self.settings.model_dump(mode="json", include=set(self.job.pinned if self.job else ()))
        about = {
            "settings": {**pinned, **self._chosen},
            "seconds": self._progress.total_seconds,
            "done": self._progress.done,
            "layout": self.layout,
        }
        with self._watchdog.phase("saving"):
            return saver.write(step, (self._state or {}) if state is None else state, about, wait)

    # ---- steps

    def steps(
        self,
        total: int | None,
        state: State | None,
        *,
        until: Callable[[], bool] | None,
        settled: Callable[[], bool] | None,
        work: float | None,
        goal: float | None,
        facts: dict[str, Any],
    ) -> Iterator[int]:
        """See `Context.steps`."""
        self.require_saver()
        if not self._looked_for_checkpoint:
            raise UsageError(NOT_RESTORED)
        self._state = state if state is not None else self._state or {}
        if not self._progress.started:
            done = self._progress.done
            self.start(TrainingStarted(self.step, done=done, total=work, goal=goal, steps=total, facts=facts))
        while (total is None or self.step < total) and not (until is not None and until()):
            draining = self.draining
            if self.due and (settled is None or not draining or settled()):
                self.save(drain=draining)
            self._redo, self._stepping = False, True
            began, joins, losses = time.monotonic(), self._group.joins, self._group.losses
            try:
                with self._watchdog.step(self.step + 1):
                    yield self.step + 1
            finally:  # also after a `break`
                self._stepping = False
                if not self._redo:
                    self.step += 1
            if not self._redo:
                if (joins, losses) != (self._group.joins, self._group.losses):
                    self._count_stall("lost" if losses != self._group.losses else "joined", time.monotonic() - began)
                self._progress.complete(self.step)
        self._watchdog.idle()
        if total is not None and self.step >= total:  # a drain changes nothing about that
            self._saw_drain = False

    def _count_stall(self, change: Change, seconds: float) -> None:
        """Members joined or were lost in the step just made, which took `seconds`."""
        usual = self._watchdog.usual_seconds
        if usual is not None and seconds > usual:
            self._progress.stalled(self.step, change, seconds - usual)

    def redo(self) -> None:
        """See `Context.redo`."""
        self._redo = True

    # ---- progress

    def start(self, event: TrainingStarted) -> None:
        """See `Context.start`."""
        self._record_start(event.step)
        self._watchdog.ready()
        if self._group.is_rank0:
            self._progress.take(event)
        else:
            self._group.connected.forward(event)

    def _record_start(self, step: int) -> None:
        """The run's history has this generation, also of a job that neither restores nor starts."""
        if self._group.is_rank0 and not self._start_recorded:  # otherwise `snapshot` has done so
            self._start_recorded = True
            self._supervision.record("start", step, self._group.generation)

    def log(self, event: StepLogged) -> None:
        """See `Context.log`."""
        if self._group.is_rank0:
            if (event.score, event.loss, event.done) != (None, None, None):  # points of curves
                self._record_start(self.step)
            step = self._step_of_state if event.step is None else event.step
            self._progress.take(replace(event, step=step, ended=not self._stepping))
            return
        if event.done is not None and event.step is not None:
            self.report_step(event.step)
        self._group.connected.forward(event)

    def report_step(self, step: int) -> None:
        """See `Context.report_step`."""
        self._watchdog.ready()
        self._supervision.report_step(step)
        recorder.since(self._reported_ns, "step", step=step)
        self._reported_ns = time.monotonic_ns()

    # ---- the end

    def finish(self, message: str, step: int | None, state: State | None, summary: Mapping[str, Any]) -> dict[str, Any]:
        """See `Context.finish`."""
        self._record_start(self.step)
        step = self._step_of_state if step is None else step
        self._stepping, self._redo = False, True  # the loop of `steps`, if `finish` is called in it, has made its step
        self._progress.complete(step)
        self._watchdog.idle()
        saved = self._write_last(step, state)
        seconds = self._progress.total_seconds
        self.logger.info(message, steps=step, seconds=round(seconds, 1))
        known = {"seconds": seconds, **({} if saved is None else {"saved": saved})}
        lost = {rundir.CHECKPOINT_LOST: True} if saved is False else {}
        self.step, self.finished = step, {**known, **result_of(summary), **lost}
        return self.finished

    def end(self, returned: Any) -> dict[str, Any]:
        """The summary of rank 0's function, which has `returned` that. Raises `Drained`, with the last checkpoint
        written, if it did so because of a drain, and UsageError for what no summary can hold."""
        if self._saw_drain and self.finished is None:
            self._record_start(self.step)
            self._write_last(self._step_of_state, None)
            raise Drained(self.step)
        finished = self.finished or self.finish("Finished", None, None, {})
        if returned is not None and not isinstance(returned, Mapping):
            raise UsageError(f"rank 0's function returns a {type(returned).__name__}; return a dict, or nothing")
        return {**finished, **result_of(returned or {})}

    def _write_last(self, step: int, state: State | None) -> bool | None:
        """Writes the last checkpoint, if there is a state. No later one makes up for it, so it is tried several times.
        Returns whether it is on disk."""
        if state is None and self._state is None:
            return None
        for attempt in range(LAST_CHECKPOINT_TRIES):
            if attempt:
                time.sleep(LAST_CHECKPOINT_PAUSE_SECONDS)
            if not self._write(step, state, wait=True):
                return True
        return False


def result_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """`summary` as JSON's types, with arrays' and tensors' scalars as numbers. Raises UsageError for anything else."""
    result: dict[str, Any] = {}
    for name, value in summary.items():
        try:
            result |= json.loads(json.dumps({name: _plain(value)}))
            encode(result)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the result's {name!r} is a {type(value).__name__}: {error}; {RESULT}") from error
    if (size := len(json.dumps(result))) > MAX_RESULT_BYTES:
        raise UsageError(f"the result has {size} bytes, more than {MAX_RESULT_BYTES}; {RESULT}")
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if getattr(value, "shape", None) == () else value  # numpy's and torch's scalars
