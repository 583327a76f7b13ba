"""Batched inference at the agent: one forward pass answers all waiting calls of the observers.

Shapes: n are the environments of a group, ... an observation's own shape, A an action's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rolecall import PeerLostError
from rolecall.jobs.rl.actor import Actor, RecurrentState, TrajectoryBuilder
from rolecall.jobs.rl.messages import Array, Trajectory

MAX_BATCH_OBSERVATIONS = 4096  # bounds the memory and the time of one forward pass
BATCH_WAIT_SECONDS = 0.00005  # less than half the round trip of a call, so a late group delays the others little


class Group(NamedTuple):
    """A group of environments: its observer, and its number there. `join` is that of the observer's `Peer`: if it is
    lost and joins again, it has other groups.
    """

    observer: str
    join: int
    number: int


@dataclass(frozen=True)
class PendingCall:
    """A call that waits for actions for observations [n, ...]; dones [n] are of the step that led to them."""

    group: Group
    builder: TrajectoryBuilder
    observations: Array
    dones: Array
    answer: Future[Array]
    since: float


class Batcher:
    """Answers `submit` with actions, and records the trajectories of the groups.

    A batch consists of waiting calls with up to `max_batch` observations; a single call is not split. It is computed
    when it is full, when it has a call of every group whose rollout is under way, or `wait` seconds after its first
    call, so that a slow or dead observer delays no other. The states of the groups stay here from rollout to rollout.
    `observe` is called with the size and the seconds of each forward pass.
    """

    def __init__(
        self,
        actor: Actor,
        shape: tuple[int, ...],
        max_batch: int = MAX_BATCH_OBSERVATIONS,
        wait: float = BATCH_WAIT_SECONDS,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self._actor, self._shape = actor, shape
        self._max_batch, self._wait, self._observe = max_batch, wait, observe
        self._calls: deque[PendingCall] = deque()
        self._builders: dict[Group, TrajectoryBuilder] = {}
        self._states: dict[Group, RecurrentState] = {}
        self._finished: dict[Group, Trajectory] = {}
        self._condition = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def begin(self, groups: Mapping[Group, int], version: int) -> None:
        """Starts a rollout of `groups`, with their numbers of environments, under the policy of `version`. Drops the
        rest of the previous rollout.
        """
        with self._condition:
            self._refuse(self._calls, PeerLostError("the rollout is over"))
            self._calls.clear()
            self._states = {
                group: self._states.get(group) or self._actor.initial_state(count) for group, count in groups.items()
            }
            for state in self._states.values():
                self._actor.refresh(state)
            self._builders = {group: TrajectoryBuilder(version, state) for group, state in self._states.items()}
            self._finished = {}

    def drop(self, observer: str) -> None:
        """Drops `observer` and the states of its groups: its calls are refused from now on."""
        with self._condition:
            for group in [group for group in self._builders if group.observer == observer]:
                del self._builders[group], self._states[group]
                self._finished.pop(group, None)
            dropped = [call for call in self._calls if call.group.observer == observer]
            self._refuse(dropped, PeerLostError(f"{observer} was given up"))
            self._calls = deque(call for call in self._calls if call.group.observer != observer)
            self._condition.notify()

    def submit(self, group: Group, observations: Array, rewards: Array, dones: Array, last: bool) -> Future[Array]:
        """Takes a step of a group: the observations [n, ...], and the rewards [n] and dones [n] that led to them. The
        answer is its actions [n, A], or PeerLostError if the rollout ends or the group is dropped meanwhile, or the
        error of the policy.

        The `last` call of a rollout completes its trajectory, and the answer to it is empty.
        Raises PeerLostError if the group is not part of the rollout, and ValueError for observations of another shape.
        """
        if observations.shape[1:] != self._shape:
            raise ValueError(f"observations of shape {observations.shape[1:]}, not {self._shape}")
        answer: Future[Array] = Future()
        answer.set_running_or_notify_cancel()  # the loss of its caller cannot cancel it
        with self._condition:
            builder = self._builders.get(group)
            if builder is None or group in self._finished:
                raise PeerLostError(
                    f"group {group.number} of {group.observer} is not part of this rollout: it was given up"
                )
            builder.see(observations, rewards, dones)
            if last:
                self._finished[group] = builder.trajectory()
                answer.set_result(np.zeros(0))
            else:
                self._calls.append(
                    PendingCall(group, builder, observations, dones, answer=answer, since=time.monotonic())
                )
            self._condition.notify()
        return answer

    def trajectories(self, observer: str) -> list[Trajectory]:
        """The finished trajectories of the groups of an observer, in the order of their numbers."""
        with self._condition:
            return [self._finished[group] for group in sorted(self._finished) if group.observer == observer]

    def _serve(self) -> None:
        while True:
            with self._condition:
                batch = self._next_batch()
            try:
                self._answer(batch)
            except Exception as error:  # the callers raise it
                self._refuse([call for call in batch if not call.answer.done()], error)

    def _next_batch(self) -> list[PendingCall]:
        """Waits for a batch; empty if the calls were dropped meanwhile. Needs the condition."""
        while not self._calls:
            self._condition.wait()  # no caller waits now
        leaves = self._calls[0].since + self._wait
        while self._calls and self._size() < self._max_batch and len(self._calls) < self._under_way():
            left = leaves - time.monotonic()
            if left <= 0 or not self._condition.wait(left):
                break
        batch: list[PendingCall] = []
        size = 0
        while self._calls and (not batch or size + len(self._calls[0].observations) <= self._max_batch):
            batch.append(self._calls.popleft())
            size += len(batch[-1].observations)
        return batch

    def _size(self) -> int:
        return sum(len(call.observations) for call in self._calls)

    def _under_way(self) -> int:
        return len(self._builders) - len(self._finished)

    def _answer(self, batch: list[PendingCall]) -> None:
        if not batch:
            return
        started = time.perf_counter()
        observations = np.concatenate([call.observations for call in batch])
        dones = np.concatenate([call.dones for call in batch])
        actions, log_probabilities = self._actor.act(observations, dones, [call.builder.state for call in batch])
        self._observe(len(observations), time.perf_counter() - started)
        answers: list[tuple[Future[Array], Array]] = []
        offset = 0
        with self._condition:
            for call in batch:
                part = slice(offset, offset + len(call.observations))
                chosen, offset = actions[part], part.stop
                if self._builders.get(call.group) is call.builder:
                    call.builder.choose(chosen, log_probabilities[part])
                    answers.append((call.answer, chosen))
                else:  # `begin` or `drop` was called during the forward pass
                    self._refuse([call], PeerLostError("the rollout is over"))
        for answer, chosen in answers:
            answer.set_result(chosen)

    @staticmethod
    def _refuse(calls: Iterable[PendingCall], error: Exception) -> None:
        for call in calls:
            call.answer.set_exception(error)
