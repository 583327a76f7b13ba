"""Rank 0's checkpoints: when one is due, and how it is written, beside the training where ranks hold shares."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints, pack
from rolecall.context.pace import in_phase
from rolecall.context.peers import Peers, S
from rolecall.context.progress import Progress
from rolecall.declare.plain import is_stateful, require_plain
from rolecall.errors import Drained, UsageError
from rolecall.record.recorder import recorder

if TYPE_CHECKING:
    from rolecall.checkpoint.shardfile import ShardFile

State = dict[str, Any]


@dataclass(frozen=True)
class Collected:
    """A checkpoint's files of one sharded value, and the longest that its members' changes waited, in seconds."""

    files: list[ShardFile]
    stalled: float


class ShardedValue:
    """A value that other ranks hold shares of; see `Sharded`."""

    def begin(self, step: int) -> None:
        """Has every member capture its share of the state after `step`."""
        raise NotImplementedError

    def collect(self, step: int) -> Collected:
        """Waits until the members' files of `step` are on disk. Raises CheckpointError."""
        raise NotImplementedError

    def load(self, stem: str, files: list[ShardFile]) -> None:
        """Has every member read its share. Raises CheckpointError where one of `files` cannot be used."""
        raise NotImplementedError


@dataclass
class Saving(Peers[S]):
    """Progress and checkpoints, on top of a rank's peers."""

    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.progress = Progress(self.settings, self.metrics, self.supervision, self.job, self.pace.complete)
        self._state: State | None = None  # what `steps` saves
        self._chosen: dict[str, Any] = {}  # values of pinned settings that have none of their own
        self._step = 0  # the newest that was made, or resumed from
        self._stepping = False  # the next one is under way
        self._saved_at = time.monotonic()
        self._saving: Future[bool] | None = None  # the newest checkpoint that is written beside the training
        self._writer = ThreadPoolExecutor(1)

    @property
    def layout(self) -> int:
        """See `Job.layout`."""
        return self.job.layout if self.job else 1

    @property
    def draining(self) -> bool:
        """Whether the job is to stop after the current step and write a checkpoint."""
        return self._drain.is_set()

    def drain(self) -> None:
        """Orders a drain."""
        self._drain.set()

    def await_drain(self) -> None:
        """Returns as soon as a drain is ordered."""
        self._drain.wait()  # bounded by the supervisor

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due: CHECKPOINT_INTERVAL has passed and the last one is written, or a drain was
        ordered.
        """
        saving = self._saving is not None and not self._saving.done()
        passed = time.monotonic() - self._saved_at > self.settings.checkpoint_interval
        return self.draining or (passed and not saving)

    def save(self, step: int | None = None, state: State | None = None, *, drain: bool | None = None) -> None:
        """Writes the checkpoint of `step` with `state`, by default those of `steps`. Raises `Drained` after it where a
        drain is ordered (`drain`: by default, whether one is). Where it cannot be written, training goes on, and the
        drain is given up.
        """
        ending = self.draining if drain is None else drain
        step = self._step + self._stepping if step is None else step  # within a step, the state is that after it
        if self._write(step, state, ending, wait=ending) and ending:
            raise Drained(step)

    @in_phase("saving")
    def _write(self, step: int, state: State | None, drain: bool, wait: bool = True) -> bool:
        """Writes a checkpoint; what other ranks hold shares of beside the training, unless `wait` is set."""
        self._saved_at = time.monotonic()
        if self._saving is not None:  # one at a time; raises what it raised
            self._saving.result()
        state = (self._state or {}) if state is None else state
        sharded = {name: value for name, value in state.items() if isinstance(value, ShardedValue)}
        values = {name: value.state_dict() if is_stateful(value) else value for name, value in state.items()}
        for name, value in values.items():
            require_plain(name, value)
        pinned = self.settings.model_dump(mode="json", include=set(self.job.pinned if self.job else ()))
        about = {"settings": {**pinned, **self._chosen}, "seconds": self.progress.total_seconds,
                 "done": self.progress.done, "layout": self.layout}  # fmt: skip
        try:
            for each in sharded.values():
                each.begin(step)
        except CheckpointError as error:
            return self._not_written(error, drain)
        packed = pack(values, about)
        write = partial(self._complete, step, packed, sharded, drain, self._saved_at, time.monotonic())
        self._saving = None if wait or not sharded else self._writer.submit(write)
        return True if self._saving else write()

    def _complete(self, step: int, packed: memoryview, sharded: dict[str, ShardedValue], drain: bool, begun: float,
                  captured: float) -> bool:  # fmt: skip
        """Writes what makes a checkpoint valid, once the shares are on disk."""
        span = recorder.span("checkpoint", step=step)
        try:
            shares = {name: value.collect(step) for name, value in sharded.items()}
            files = {name: each.files for name, each in shares.items()}
            path = self.require_checkpoints().write(step, packed, shards=files)
        except CheckpointError as error:
            span.note(error=error)
            return self._not_written(error, drain)
        finally:
            span.end()
        seconds = time.monotonic() - begun
        self.metrics.checkpoint_seconds.observe(seconds)
        self.metrics.checkpoint_timestamp_seconds.set_to_current_time()
        stalled = captured - begun + max((each.stalled for each in shares.values()), default=0.0)
        beside = {"stalled": round(stalled, 3)} if shares else {}
        self.logger.info("checkpoint", file=path.name, seconds=round(seconds, 3), **beside)
        return True

    def _not_written(self, error: CheckpointError, drain: bool) -> bool:
        self.metrics.checkpoint_failures.inc()
        self.logger.error("no checkpoint written; training goes on", problem=str(error))
        if drain:
            self._drain.clear()
            self.supervision.refuse_drain(str(error))
        return False

    def require_checkpoints(self) -> Checkpoints:
        """The run's checkpoints. Raises UsageError at another rank than rank 0."""
        if self.checkpoints is None:
            raise UsageError("only rank 0 reads and writes checkpoints")
        return self.checkpoints
