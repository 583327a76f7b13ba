"""What a context does for training: where it resumes, its steps and log, when a checkpoint is due, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import KEPT, Snapshot
from rolecall.checkpoint.kept import KeptStates
from rolecall.checkpoint.saving import Saver, State, load_state, saved_state
from rolecall.checkpoint.sharded import Sharded
from rolecall.context.group import Group
from rolecall.context.progress import Change, Progress, StepLogged, TrainingStarted
from rolecall.errors import Drained, UsageError
from rolecall.messages.codec import encode
from rolecall.record import rundir
from rolecall.record.history import BAND, Start
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
    """State, steps and log of one worker. Only rank 0 has a `saver`; the other ranks forward what they log to it."""

    def __init__(self, group: Group, progress: Progress, saver: Saver | None) -> None:
        self.group, self.progress, self._saver = group, progress, saver
        self.settings, self.job, self.logger = group.settings, group.job, telemetry.log()
        self.watchdog, self.supervision = group.watchdog, group.supervision
        self._finished: dict[str, Any] | None = None  # the summary, once `finish` was called
        self._step = 0
        self._saw_drain = False  # the role's function was told of the drain
        self._layout = group.job.layout if group.job else 1
        self._state: State | None = None  # what `steps` saves
        self._chosen: dict[str, Any] = {}  # values of pinned settings that have none of their own
        self._stepping = False  # the step after `step` is under way
        self._redo = False
        self._start_recorded = False  # the run's history knows of this generation
        self._looked_for_checkpoint = False
        self.kept_states: KeptStates | None = None  # of members, at rank 0
        self._reported_ns = 0  # when this rank, other than rank 0, last reported a step

    def require_saver(self) -> Saver:
        """Writes and reads the run's checkpoints. Raises UsageError at another rank than rank 0."""
        if self._saver is None:
            raise UsageError("only rank 0 reads and writes checkpoints")
        return self._saver

    @property
    def _step_of_state(self) -> int:
        """The step that the state belongs to: within a step, the state is that after it."""
        return self._step + self._stepping

    # ---- the state

    def restore(self, state: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> State:
        """Returns `state` as the newest checkpoint has it, or unchanged if there is none; `steps` and `finish` save it
        from now on. Values with `state_dict` and `load_state_dict` (torch.distributed.checkpoint's Stateful: modules,
        optimizers, objects of the job's own) are loaded in place. The others (numbers, strings, tensors, and lists,
        sets and dicts of those) are replaced. `chosen` are the values of pinned settings whose default depends on the
        job's data: the checkpoint holds them in place of the settings' own.

        Raises UsageError for other values, for a checkpoint that does not fit or was made with other pinned settings,
        and if there are checkpoints of which none can be read.
        """
        with self.watchdog.phase("restoring"):
            self._state, self._chosen = dict(state), dict(chosen or {})
            for name in self._chosen:
                if self.job is not None and name not in self.job.pinned:
                    problem = f"restore(chosen={{{name!r}: ...}}): is no pinned setting"
                    raise UsageError(f"{problem}; add it to Job(pinned=...)")
            saved_state(state)
            if snapshot := self.snapshot():
                load_state(self._state, snapshot.state, snapshot.path.name)
            return self._state

    def snapshot(self) -> Snapshot | None:
        """The newest checkpoint, or None. Raises UsageError if it was made with other pinned settings, or if none of
        the checkpoints can be read."""
        checkpoints = self.require_saver().checkpoints
        with self.watchdog.phase("restoring"):
            self._start_recorded = self._looked_for_checkpoint = True
            snapshot = checkpoints.newest(self._load_shares)
        if snapshot is not None:
            self._step, about = snapshot.step, snapshot.about
            self.progress.resume(self._step, float(about.get("done", 0.0)), float(about.get("seconds", 0.0)))
            self.logger.info("resumed", file=snapshot.path.name, step=snapshot.step)
        if self.kept_states:
            self.kept_states.open()
        return snapshot

    def _load_shares(self, snapshot: Snapshot) -> Snapshot:
        """Has the ranks that hold shares of the state's values read them. Raises CheckpointError."""
        snapshot.require_layout(self._layout, "finish the run with that version, or set another CHECKPOINT_DIR")
        snapshot.require_settings(self.settings, self._chosen)
        if self.kept_states:
            self.kept_states.offer(snapshot)
        sharded = {name: value for name, value in (self._state or {}).items() if isinstance(value, Sharded)}
        for name, value in sharded.items():
            if name in snapshot.shards:
                value.load(snapshot.path.stem, snapshot.shards[name])
        return replace(snapshot, shards={n: files for n, files in snapshot.shards.items() if n not in sharded}).whole()

    # ---- checkpoints

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due: a drain was ordered, or CHECKPOINT_INTERVAL has passed and the checkpoint before
        is written."""
        return self.draining or self.require_saver().due(self.settings.checkpoint_interval)

    @property
    def draining(self) -> bool:
        """Whether the job is to stop after the current step and write a checkpoint. If rank 0's function returns once
        this was true, the job has drained, and goes on at the next start: only `finish` says otherwise."""
        self._saw_drain = self.group.drain_ordered.is_set()
        return self._saw_drain

    def drain(self) -> None:
        """Orders a drain."""
        self.group.drain_ordered.set()

    def await_drain(self) -> None:
        """Returns as soon as a drain is ordered, which is seen then as by `draining`."""
        self.group.drain_ordered.wait()  # bounded by the supervisor
        self._saw_drain = True

    def save(self, step: int | None = None, state: State | None = None, *, drain: bool | None = None) -> None:
        """Writes the checkpoint of `step` with `state`, by default those of `steps`. If a drain is ordered (`drain`: by
        default, whether one is), raises `Drained` after it. If it cannot be written, training goes on, and the drain is
        given up.
        """
        ending = self.group.drain_ordered.is_set() if drain is None else drain
        step = self._step_of_state if step is None else step
        problem = self._write(step, state, wait=ending)
        if not ending:
            return
        if not problem:
            raise Drained(step)
        self.group.drain_ordered.clear()
        self._saw_drain = False
        self.supervision.refuse_drain()

    def _write(self, step: int, state: State | None, wait: bool) -> str:
        """Writes a checkpoint. Returns the problem if it cannot be written."""
        saver = self.require_saver()
        pinned = self.settings.model_dump(mode="json", include=set(self.job.pinned if self.job else ()))
        about = {
            "settings": {**pinned, **self._chosen},
            "seconds": self.progress.total_seconds,
            "done": self.progress.done,
            "layout": self._layout,
        }
        state = (self._state or {}) if state is None else state
        if self.kept_states and self.kept_states.used:
            state = {**state, KEPT: self.kept_states}
        with self.watchdog.phase("saving"):
            return saver.write(step, state, about, wait)

    # ---- steps

    def steps(
        self,
        total: int | None = None,
        state: State | None = None,
        *,
        until: Callable[[], bool] | None = None,
        settled: Callable[[], bool] | None = None,
        work: float | None = None,
        goal: float | None = None,
        **facts: Any,
    ) -> Iterator[int]:
        """Yields the numbers of the steps to make: from the one after the checkpoint that `restore` returned, to
        `total`, or until `until()` is true. Before each step it writes a checkpoint of `state` (by default, that of
        `restore`) if one is due, and raises `Drained` if a drain is ordered. A `break` ends the loop with the step
        under way. After the order to drain, steps go on until `settled()` is true, if it is given: the caller bounds
        that by DRAIN_TIMEOUT.

        `work` is the work of the whole training, in the job's unit, from which the time left follows; `goal` is the
        score to reach; `facts` are for the log.

        Raises UsageError without an earlier call of `restore` or `snapshot`: each generation would begin at step 1.
        """
        saver = self.require_saver()
        if not self._looked_for_checkpoint:
            raise UsageError(NOT_RESTORED)
        self._state = state if state is not None else self._state or {}
        if not self.progress.started:
            done = self.progress.done
            self._start(TrainingStarted(self._step, done=done, total=work, goal=goal, steps=total, facts=facts))
        while (total is None or self._step < total) and not (until is not None and until()):
            draining = self.group.drain_ordered.is_set()
            due = draining or saver.due(self.settings.checkpoint_interval)
            if due and (settled is None or not draining or settled()):
                self.save(drain=draining)
            self._redo, self._stepping = False, True
            began, joins, losses = time.monotonic(), self.group.joins, self.group.losses
            try:
                with self.watchdog.step(self._step + 1):
                    yield self._step + 1
            finally:  # also after a `break`
                self._stepping = False
                if not self._redo:
                    self._step += 1
            if not self._redo:
                if (joins, losses) != (self.group.joins, self.group.losses):
                    self._count_stall("lost" if losses != self.group.losses else "joined", time.monotonic() - began)
                self.progress.complete(self._step)
        self.watchdog.idle()
        if total is not None and self._step >= total:  # a drain changes nothing about that
            self._saw_drain = False

    def _count_stall(self, change: Change, seconds: float) -> None:
        """Members joined or were lost in the step just made, which took `seconds`."""
        usual = self.watchdog.usual_seconds
        if usual is not None and seconds > usual:
            self.progress.stalled(self._step, change, seconds - usual)

    def redo(self) -> None:
        """The step under way is made again: `steps` yields its number once more."""
        self._redo = True

    @property
    def step(self) -> int:
        """The newest step that was made, or resumed from."""
        return self._step

    # ---- progress

    def start(
        self, step: int, *, done: float = 0, total: float | None = None, goal: float | None = None, **facts: Any
    ) -> None:
        """Training begins after `step`, 0 at the beginning and in a job without steps, with `done` units of work behind
        it and `total` at its end, towards a score of `goal`. `facts` are for the log. `steps` calls it.
        """
        self._start(TrainingStarted(step, done=done, total=total, goal=goal, facts=facts))

    def _start(self, event: TrainingStarted) -> None:
        self._record_start(event.step)
        self.watchdog.ready()
        if self.kept_states:
            self.kept_states.open()  # a job without a state
        if self.group.is_rank0:
            self.progress.take(event)
        else:
            self.group.connected.forward(event)

    def _record_start(self, step: int) -> None:
        """The run's history has this generation, also of a job that neither restores nor starts."""
        if self.group.is_rank0 and not self._start_recorded:  # otherwise `snapshot` has done so
            self._start_recorded = True
            self.supervision.record(Start(self.group.generation, step))

    def log(
        self,
        step: int | None = None,
        *,
        done: float | None = None,
        loss: float | None = None,
        score: float | None = None,
        spread: tuple[float, float] | None = None,
        epoch: int | None = None,
        message: str = "",
        **values: float,
    ) -> None:
        """Reports the training after `step`, by default the one under way: metrics, the run's history, and a log line
        every LOG_INTERVAL steps.

        `done` is the work so far, in the job's unit, from which rate and time left follow; if a job never gives it, it
        is the number of steps. `loss` is the mean loss over the work since the last call. `score` is a point of the
        curve; `spread`, the lowest and the highest of what it is a mean of, is drawn as a band around it. `epoch`
        counts from 1. `values` are gauges: the job's own by their metrics' names, others as `rolecall_value`. A line
        begins with `message`, if one is given. `step` may be an earlier one, without `done`, whose score is known only
        now. Raises UsageError for a value with the name of a bound of the `spread`.
        """
        if name := next((name for name in BAND if name in values), ""):  # it would be kept where a score is, alone
            raise UsageError(f"log({name}=...): give spread=(low, high)")
        event = StepLogged(
            step=step,
            done=_number(done),
            loss=_number(loss),
            score=_number(score),
            spread=None if spread is None else (float(spread[0]), float(spread[1])),
            epoch=epoch,
            message=message,
            values={name: _number(value) for name, value in values.items()},
        )
        if self.group.is_rank0:
            if event.has_progress:
                self._record_start(self._step)
            step = self._step_of_state if step is None else step
            self.progress.take(replace(event, step=step, ended=not self._stepping))
            return
        if done is not None and step is not None:
            self.report_step(step)
        self.group.connected.forward(event)

    def report_step(self, step: int) -> None:
        """Reports that this rank, other than rank 0, has made `step`: after progress, earlier failures do not count."""
        self.watchdog.ready()
        self.supervision.report_step(step)
        recorder.since(self._reported_ns, "step", step=step)
        self._reported_ns = time.monotonic_ns()

    # ---- the end

    def finish(
        self, message: str = "Finished", *, step: int | None = None, state: State | None = None, **summary: Any
    ) -> dict[str, Any]:
        """Writes the last checkpoint and logs `message`. Returns the summary, with `seconds` of training and whether
        the checkpoint was `saved`, unless `summary` has its own. Raises UsageError for what no summary can hold: beside
        JSON's types it holds scalars of numpy and torch. It is called for a function of rank 0 that returns a summary
        without it.
        """
        self._record_start(self._step)
        step = self._step_of_state if step is None else step
        self._stepping, self._redo = False, True  # the loop of `steps`, if `finish` is called in it, has made its step
        self.progress.complete(step)
        self.watchdog.idle()
        saved = self._write_last(step, state)
        seconds = self.progress.total_seconds
        self.logger.info(message, steps=step, seconds=round(seconds, 1))
        known = {"seconds": seconds, **({} if saved is None else {"saved": saved})}
        lost = {rundir.CHECKPOINT_LOST: True} if saved is False else {}
        self._step, self._finished = step, {**known, **result_of(summary), **lost}
        return self._finished

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


def summary_of(training: Training, returned: Any) -> dict[str, Any]:
    """The summary of rank 0's function, which has `returned` that. Raises `Drained`, with the last checkpoint written,
    if it did so because of a drain, and UsageError for what no summary can hold."""
    if training._saw_drain and training._finished is None:
        training._record_start(training.step)
        training._write_last(training._step_of_state, None)
        raise Drained(training.step)
    finished = training._finished or training.finish()
    if returned is not None and not isinstance(returned, Mapping):
        raise UsageError(f"rank 0's function returns a {type(returned).__name__}; return a dict, or nothing")
    return {**finished, **result_of(returned or {})}


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


def _number(value: Any) -> Any:
    """A tensor, too, as a float: one with its graph would keep all of that in memory."""
    return None if value is None else float(value.detach() if hasattr(value, "detach") else value)
