"""Writes rank 0's checkpoints. If other ranks hold shares of the state, they are written while training goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints, pack
from rolecall.checkpoint.sharded import Sharded
from rolecall.declare.plain import is_stateful, require_plain
from rolecall.errors import UsageError
from rolecall.record.recorder import recorder

State = dict[str, Any]


def load_state(state: State, saved: Mapping[str, Any], file: str) -> None:
    """Sets the values of `state` to what was `saved` in `file`: those that are Stateful in place. One that was not
    saved stays. Raises UsageError for one that does not fit."""
    for name, value in state.items():
        if name not in saved:
            telemetry.log().warning("the checkpoint lacks a value, which begins anew", value=name)
        elif is_stateful(value):
            advice = "restore what the job was trained with, or set another CHECKPOINT_DIR"
            with UsageError.wrap(f"{file}: {name} does not fit this program", advice=advice):
                value.load_state_dict(saved[name])
        else:
            state[name] = saved[name]


def saved_state(state: Mapping[str, Any]) -> State:
    """The values of `state` as a checkpoint holds them. Raises UsageError for one that it cannot hold."""
    values = {name: value.state_dict() if is_stateful(value) else value for name, value in state.items()}
    for name, value in values.items():
        require_plain(name, value)
    return values


class Saver:
    """Writes one checkpoint at a time."""

    def __init__(self, checkpoints: Checkpoints, metrics: Any) -> None:
        self.checkpoints, self._metrics = checkpoints, metrics
        self.logger = telemetry.log()
        self._begun_at = time.monotonic()  # of the newest checkpoint
        self._under_way: Future[str] | None = None
        self._writer = ThreadPoolExecutor(1)

    def due(self, interval: float) -> bool:
        """Whether the newest checkpoint was begun more than `interval` seconds ago, and is written."""
        writing = self._under_way is not None and not self._under_way.done()
        return time.monotonic() - self._begun_at > interval and not writing

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the checkpoint that is being written. Returns whether one was, and is on disk now; raises what
        writing it raised."""
        return self._under_way is not None and not self._under_way.result(timeout)

    def write(self, step: int, state: State, about: dict[str, Any], wait: bool) -> str:
        """Writes the checkpoint of `step`, after the one before. Returns the problem if it cannot be written, otherwise
        "". With sharded values it returns once they are captured, unless `wait` is set.
        """
        self._begun_at = begun_at = time.monotonic()
        self.wait()
        sharded = {name: value for name, value in state.items() if isinstance(value, Sharded)}
        values = saved_state(state)
        try:
            for each in sharded.values():
                each.begin(step)
        except CheckpointError as error:
            return self._failed(error)
        complete = partial(
            self._complete, step, pack(values, about), sharded, begun_at=begun_at, captured_at=time.monotonic()
        )
        if wait or not sharded:
            self._under_way = None
            problem = complete()
            if wait and not problem:
                self.checkpoints.copies.wait()
            return problem
        self._under_way = self._writer.submit(complete)
        return ""

    def _complete(
        self, step: int, packed: memoryview, sharded: dict[str, Sharded], begun_at: float, captured_at: float
    ) -> str:
        """Writes the file that makes a checkpoint valid, once the shares are on disk."""
        span = recorder.span("checkpoint", step=step)
        try:
            shares = {name: value.collect(step) for name, value in sharded.items()}
            files = {name: each.files for name, each in shares.items()}
            path = self.checkpoints.write(step, packed, shards=files)
        except CheckpointError as error:
            span.note(error=error)
            return self._failed(error)
        finally:
            span.end()
        seconds = time.monotonic() - begun_at
        self._metrics.checkpoint_seconds.observe(seconds)
        self._metrics.checkpoint_timestamp_seconds.set_to_current_time()
        stalled = captured_at - begun_at + max((each.stalled for each in shares.values()), default=0.0)
        beside = {"stalled": round(stalled, 3)} if shares else {}
        self.logger.info("checkpoint", file=path.name, seconds=round(seconds, 3), **beside)
        return ""

    def close(self) -> None:
        """Ends its thread, after the checkpoint that is being written."""
        self.checkpoints.copies.close()
        self._writer.shutdown(wait=False)

    def _failed(self, error: CheckpointError) -> str:
        self._metrics.checkpoint_failures.inc()
        self.logger.error("no checkpoint written; training goes on", problem=str(error))
        return str(error)
