"""Batched inference at the agent: the observers' calls that are waiting go through the policy together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.futures import Future

from rolecall.job.rpc import PeerLostError
from rolecall.jobs.rl.envs import Array, Recorder, Trajectory, unpack

Answer = bytes | Exception  # actions, or what the caller is to raise
Source = tuple[str, int]  # an observer's name and the number of one of its groups


@dataclass(frozen=True)
class Call:
    source: Source
    recorder: Recorder
    observations: Array
    answer: Future[Answer]
    waiting_since: float


class Batcher:
    """Answers `submit` with actions, and records the trajectories that the calls make up.

    A batch takes the calls that are waiting, up to `max_batch` observations (no single call is split); it leaves when
    it is full, when every group that is under way is waiting in it, or `wait` seconds after its first call came: nobody
    waits for a slow or dead observer. `act` maps observations [n, ...] to actions [n].
    """

    def __init__(
        self,
        act: Callable[[Array], Array],
        shape: tuple[int, ...],
        dtype: Any,
        max_batch: int,
        wait: float,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self._act, self._shape, self._dtype = act, shape, dtype
        self._max_batch, self._wait, self._observe = max_batch, wait, observe
        self._calls: deque[Call] = deque()
        self._recorders: dict[Source, Recorder] = {}
        self._finished: dict[Source, Trajectory] = {}
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def begin(self, sources: list[Source], version: int) -> None:
        """Record a new rollout of these groups; what is left of the one before is dropped."""
        with self._condition:
            self._fail(list(self._calls), PeerLostError("the rollout is over"))
            self._calls.clear()
            self._recorders = {source: Recorder(version) for source in sources}
            self._finished = {}

    def drop(self, name: str) -> None:
        """Forget the observer `name`: its calls are refused from now on."""
        with self._condition:
            for source in [source for source in self._recorders if source[0] == name]:
                del self._recorders[source]
                self._finished.pop(source, None)
            self._fail([call for call in self._calls if call.source[0] == name], PeerLostError(f"{name} was given up"))
            self._calls = deque(call for call in self._calls if call.source[0] != name)
            self._condition.notify()

    def submit(self, source: Source, message: bytes, last: bool) -> Future[Answer]:
        """A group's observations, with the rewards and ends that led to them; the answer is its actions (int64), or
        what the caller is to raise: PeerLostError where the group is not part of the rollout, or the policy's error.

        The `last` call of a rollout completes its trajectory and is answered at once, with nothing.
        Raises ValueError for a message of another shape.
        """
        observations, rewards, ends = unpack(message, self._shape, self._dtype)
        answer: Future[Answer] = Future()
        with self._condition:
            recorder = self._recorders.get(source)
            if recorder is None or source in self._finished:
                problem = f"group {source[1]} of {source[0]} is not part of this rollout: it was given up"
                answer.set_result(PeerLostError(problem))
                return answer
            recorder.see(observations, rewards, ends)
            if last:
                self._finished[source] = recorder.trajectory()
                answer.set_result(b"")
            else:
                self._calls.append(Call(source, recorder, observations, answer, time.monotonic()))
            self._condition.notify()
        return answer

    def trajectories(self, names: set[str]) -> list[Trajectory]:
        """The finished trajectories of these observers, in a fixed order."""
        with self._condition:
            return [self._finished[source] for source in sorted(self._finished) if source[0] in names]

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._fail(list(self._calls), PeerLostError("the agent has ended"))
            self._calls.clear()
            self._condition.notify()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            with self._condition:
                batch = self._next_batch()
            if batch is None:
                return
            try:
                self._answer(batch)
            except Exception as error:  # the callers hear of it, and end with it
                self._fail([call for call in batch if not call.answer.done()], error)

    def _next_batch(self) -> list[Call] | None:
        """Wait for a batch; None once closed. The condition is held."""
        while not self._calls:
            if self._closed:
                return None
            self._condition.wait()  # bounded by `close`; no caller is waiting now
        leaves = self._calls[0].waiting_since + self._wait
        while self._waiting() < self._max_batch and len(self._calls) < len(self._recorders) - len(self._finished):
            left = leaves - time.monotonic()
            if left <= 0 or not self._condition.wait(left) or not self._calls:
                break
        batch: list[Call] = []
        size = 0
        while self._calls and (not batch or size + len(self._calls[0].observations) <= self._max_batch):
            batch.append(self._calls.popleft())
            size += len(batch[-1].observations)
        return batch

    def _waiting(self) -> int:
        return sum(len(call.observations) for call in self._calls)

    def _answer(self, batch: list[Call]) -> None:
        if not batch:
            return
        started = time.perf_counter()
        joined = batch[0].observations if len(batch) == 1 else np.concatenate([call.observations for call in batch])
        actions = self._act(joined)
        self._observe(len(joined), time.perf_counter() - started)
        answers, offset = [], 0
        with self._condition:
            for call in batch:
                own = actions[offset : offset + len(call.observations)]
                offset += len(own)
                if self._recorders.get(call.source) is call.recorder:
                    call.recorder.choose(own)
                    answers.append((call.answer, own.tobytes()))
                else:  # `begin` or `drop` came while the policy computed
                    self._fail([call], PeerLostError("the rollout is over"))
        for answer, own_bytes in answers:
            if not answer.done():
                answer.set_result(own_bytes)

    @staticmethod
    def _fail(calls: list[Call], error: Exception) -> None:
        for call in calls:
            call.answer.set_result(error)  # RPC would pass an exception that was set on as a value all the same
