"""The batcher: who goes in which forward pass, who is answered what, and who is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from rolecall import PeerLostError
from rolecall.jobs.rl import messages
from rolecall.jobs.rl.actor import Choice, Memory, Recorder
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.messages import Array, Done, pack
from tests.jobs.rl_parts import assert_same

FAILSAFE = 30.0  # no test waits for it; one that would hang fails instead
LONG = 600.0  # a `wait` that no test outlives: what leaves, leaves for another reason


class Policy:
    """In place of an actor: acts 10 times the observation's second number, with its first number as the action's log
    probability. A group's state counts its steps, from 0 after an end.

    `hold` keeps the forward passes from ending meanwhile.
    """

    def __init__(self) -> None:
        self.batches: list[Array] = []
        self.refreshed: list[int] = []
        self.begun = threading.Semaphore(0)
        self._go = threading.Event()
        self._go.set()
        self.error: Exception | None = None

    def remember(self, count: int) -> Memory:
        return Memory(torch.zeros(count, 1), None)

    def refresh(self, memory: Memory) -> None:
        self.refreshed.append(len(memory.state))

    def act(self, observations: Array, dones: Array, memories: Sequence[Memory]) -> Choice:
        self.batches.append(observations.copy())
        self.begun.release()
        assert self._go.wait(FAILSAFE)
        if self.error is not None:
            raise self.error
        assert [len(observations)] * 2 == [len(dones), sum(len(memory.state) for memory in memories)]
        counted = torch.cat([memory.state for memory in memories]) + 1
        after = counted * torch.from_numpy(dones == Done.CONTINUES)[:, None]
        for memory, state in zip(memories, after.split([len(memory.state) for memory in memories]), strict=True):
            memory.state = state
        return Choice((observations[:, 1] * 10).astype(np.int64), observations[:, 0])

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    def hold(self) -> None:
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=FAILSAFE)


@pytest.fixture
def policy() -> Policy:
    return Policy()


class MakeBatcher:
    """Makes batchers, and closes them after the test."""

    def __init__(self, policy: Policy, stack: ExitStack) -> None:
        self.policy, self.stack = policy, stack

    def __call__(
        self, groups: list[Group], version: int = 0, max_batch: int = 1000, wait: float = LONG, observe: Any = None
    ) -> Batcher:
        actor: Any = self.policy
        batcher = Batcher(actor, (2,), np.float32, max_batch, wait, observe or (lambda size, seconds: None))
        self.stack.callback(batcher.close)
        self.stack.callback(self.policy.release)
        batcher.begin(of_two(groups), version)
        return batcher


@pytest.fixture
def make(policy: Policy) -> Iterator[MakeBatcher]:
    with ExitStack() as stack:
        yield MakeBatcher(policy, stack)


def of_two(groups: list[Group]) -> dict[Group, int]:
    """The groups, of two environments each."""
    return dict.fromkeys(groups, 2)


def message(first: int, count: int = 2) -> bytes:
    """Observations (0, first), (0, first + 1) and so on."""
    observations = np.zeros((count, 2), np.float32)
    observations[:, 1] = np.arange(first, first + count)
    return pack(observations, np.zeros(count, np.float32), np.zeros(count, np.uint8))


def result(answer: Future[bytes]) -> bytes:
    """The answer; raises what the call ended with, and TimeoutError if it does not end."""
    return answer.result(FAILSAFE)


def refusal(answer: Future[bytes]) -> str:
    """What an observer is to raise: not its own failure, but the loss of its peer."""
    error = answer.exception(FAILSAFE)
    assert isinstance(error, PeerLostError)
    return str(error)


def refuse(batcher: Batcher, group: Group, first: int) -> None:
    """The call of `group` is refused."""
    with pytest.raises(PeerLostError, match=f"group {group.number} of {group.observer} is not part of this rollout"):
        batcher.submit(group, message(first), False)


def actions(answer: Future[bytes]) -> list[int]:
    return np.frombuffer(result(answer), np.int64).tolist()


A, B, C, D = (Group(f"observer_{observer}", 0, number) for observer in (0, 1) for number in (0, 1))


# ---- who goes together


def test_all_that_are_under_way_go_in_one_forward(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C])
    answers = [batcher.submit(group, message(5 * number), False) for number, group in enumerate([A, B])]
    assert not policy.begun.acquire(timeout=0.1)  # time enough to leave without the third, if it would
    answers.append(batcher.submit(C, message(10), False))
    assert [actions(answer) for answer in answers] == [[0, 10], [50, 60], [100, 110]]
    assert policy.sizes == [6]


def test_calls_that_come_during_a_forward_go_together_in_the_next(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D], wait=0)
    policy.hold()
    first = batcher.submit(A, message(0), False)
    policy.wait_begun()
    others = [batcher.submit(group, message(1), False) for group in (B, C, D)]
    policy.release()
    assert [actions(answer) for answer in (first, *others)] == [[0, 10]] + [[10, 20]] * 3
    assert policy.sizes == [2, 6]


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, [2, 2, 2, 2]), (2, [2, 2, 2, 2]), (5, [2, 4, 2]), (6, [2, 6])])
def test_no_more_than_max_batch_go_together(
    make: MakeBatcher, policy: Policy, max_batch: int, sizes: list[int]
) -> None:
    """A group alone may be more than MAX_BATCH: it is not split."""
    batcher = make([A, B, C, D], wait=0, max_batch=max_batch)
    policy.hold()
    first = batcher.submit(A, message(0), False)
    policy.wait_begun()
    answers = [first] + [batcher.submit(group, message(0), False) for group in (B, C, D)]
    policy.release()
    assert [actions(answer) for answer in answers] == [[0, 10]] * 4
    assert policy.sizes == sizes


def test_a_full_batch_leaves_at_once(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D], max_batch=4)
    answers = [batcher.submit(group, message(0), False) for group in (A, B)]
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    assert policy.sizes == [4]


# ---- the deadline, and groups that do not call


def test_a_silent_group_delays_others_until_the_deadline_only(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B], wait=0.05)
    for step in range(3):
        assert actions(batcher.submit(A, message(step), False)) == [10 * step, 10 * step + 10]
    assert policy.sizes == [2, 2, 2]


def test_a_dropped_group_delays_no_other(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D])
    answers = [batcher.submit(group, message(0), False) for group in (A, B)]
    batcher.drop("observer_1")
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    assert policy.sizes == [4]


def test_a_group_that_has_finished_is_not_waited_for(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    answers = [batcher.submit(group, message(0), False) for group in (A, B)]
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    waiting = batcher.submit(B, message(3), False)
    assert result(batcher.submit(A, message(9), True)) == b""
    assert actions(waiting) == [30, 40]
    assert policy.sizes == [4, 2]


def test_the_last_call_is_answered_without_a_forward(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A])
    assert actions(batcher.submit(A, message(0), False)) == [0, 10]
    answer = batcher.submit(A, message(1), True)
    assert answer.done()
    assert result(answer) == b""
    assert policy.sizes == [2]


# ---- who is refused, and who fails


def test_drop_fails_the_waiting_calls_and_refuses_new_ones(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D], wait=0)
    policy.hold()
    other = batcher.submit(C, message(0), False)
    policy.wait_begun()
    waiting = [batcher.submit(group, message(0), False) for group in (A, B)]
    batcher.drop("observer_0")
    for answer in waiting:
        assert refusal(answer) == "observer_0 was given up"
    refuse(batcher, A, 0)
    policy.release()
    assert actions(other) == [0, 10]
    assert actions(batcher.submit(D, message(1), False)) == [10, 20]
    assert policy.sizes == [2, 2]


def test_drop_takes_a_finished_trajectory_back(make: MakeBatcher) -> None:
    batcher = make([A, C], wait=0)
    for group in (A, C):
        result(batcher.submit(group, message(0), False))
        result(batcher.submit(group, message(1), True))
    assert [len(batcher.trajectories(name)) for name in ("observer_0", "observer_1")] == [1, 1]
    batcher.drop("observer_0")
    assert [len(batcher.trajectories(name)) for name in ("observer_0", "observer_1")] == [0, 1]


def test_an_error_of_act_reaches_every_caller_and_the_next_batch_goes_on(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    policy.error = ArithmeticError("the policy is not finite")
    answers = [batcher.submit(group, message(0), False) for group in (A, B)]
    for answer in answers:
        assert repr(answer.exception(FAILSAFE)) == "ArithmeticError('the policy is not finite')"
    policy.error = None
    batcher.begin(of_two([A]), 1)
    assert actions(batcher.submit(A, message(2), False)) == [20, 30]


@pytest.mark.parametrize("group", [Group("observer_9", 0, 0), Group("observer_0", 0, 2), Group("observer_0", 1, 0)])
def test_an_unknown_group_is_refused(make: MakeBatcher, group: Group) -> None:
    refuse(make([A, B]), group, 0)


def test_a_message_of_another_shape_is_refused_and_not_recorded(make: MakeBatcher) -> None:
    batcher = make([A], wait=0)
    with pytest.raises(ValueError, match="no whole number of observations"):
        batcher.submit(A, message(0) + b"\0", False)
    result(batcher.submit(A, message(0), False))
    result(batcher.submit(A, message(1), True))
    assert batcher.trajectories("observer_0")[0].observations.shape == (2, 2, 2)


def test_a_rollout_that_is_over_is_refused(make: MakeBatcher) -> None:
    batcher = make([A, B], wait=0)
    result(batcher.submit(A, message(0), False))
    result(batcher.submit(A, message(1), True))
    refuse(batcher, A, 2)
    batcher.begin(of_two([B]), 1)
    refuse(batcher, A, 2)
    assert batcher.trajectories("observer_0") == []


def test_begin_fails_what_still_waits(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    answer = batcher.submit(A, message(0), False)
    batcher.begin(of_two([A, B]), 1)
    assert refusal(answer) == "the rollout is over"
    assert policy.sizes == []


def test_actions_of_an_old_rollout_do_not_enter_the_new_one(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A], wait=0)
    policy.hold()
    stale = batcher.submit(A, message(0), False)
    policy.wait_begun()
    batcher.begin(of_two([A]), 1)
    policy.release()
    assert refusal(stale) == "the rollout is over"
    assert actions(batcher.submit(A, message(4), False)) == [40, 50]
    assert result(batcher.submit(A, message(5), True)) == b""
    (trajectory,) = batcher.trajectories("observer_0")
    assert trajectory.actions.tolist() == [[40, 50]]
    assert trajectory.version == 1


def test_close_fails_what_still_waits_and_ends_the_thread(make: MakeBatcher) -> None:
    before = threading.active_count()
    batcher = make([A, B])
    assert threading.active_count() == before + 1
    answer = batcher.submit(A, message(0), False)
    batcher.close()
    assert refusal(answer) == "the agent has ended"
    assert threading.active_count() == before


# ---- what is recorded


class Caller:
    """Calls as an observer does: random steps, each one recorded here too."""

    def __init__(self, group: Group, count: int, version: int, state: torch.Tensor) -> None:
        self.group, self.count, self.state = group, count, state
        self.random = np.random.default_rng([sum(map(ord, group.observer)) + group.number, version])
        self.recorder = Recorder(version, self)  # type: ignore[arg-type]

    def call(self, batcher: Batcher, last: bool) -> Future[bytes]:
        self.seen = (
            self.random.integers(0, 100, (self.count, 2)).astype(np.float32),
            self.random.normal(size=self.count).astype(np.float32),
            self.random.choice([Done.CONTINUES, Done.CONTINUES, Done.TERMINATED, Done.TRUNCATED], self.count).astype(
                np.uint8
            ),
        )
        self.recorder.see(*self.seen)
        return batcher.submit(self.group, pack(*self.seen), last)

    def take(self, answer: Future[bytes]) -> None:
        observations, _, dones = self.seen
        self.recorder.choose(np.frombuffer(result(answer), np.int64), observations[:, 0])
        self.state = (self.state + 1) * torch.from_numpy(dones == Done.CONTINUES)[:, None]

    def run(self, batcher: Batcher, steps: int) -> None:
        for _ in range(steps):
            self.take(self.call(batcher, False))
        result(self.call(batcher, True))


@pytest.mark.parametrize(("wait", "max_batch"), [(0, 1000), (0.001, 1000), (0.001, 4)])
def test_trajectories_are_what_was_submitted_and_answered(
    make: MakeBatcher, policy: Policy, monkeypatch: pytest.MonkeyPatch, wait: float, max_batch: int
) -> None:
    """Groups of several observers, each calling from a thread of its own, as the wire does; two rollouts, with the
    states carried over.
    """
    monkeypatch.setattr(messages, "SEQUENCE_STEPS", 4)
    observed: list[int] = []
    batcher = make([], wait=wait, max_batch=max_batch, observe=lambda size, seconds: observed.append(size))
    sizes = {group: 1 + number for number, group in enumerate((A, B, C, D))}
    states = {group: torch.zeros(size, 1) for group, size in sizes.items()}
    for version in (3, 4):
        callers = [Caller(group, size, version, states[group]) for group, size in sizes.items()]
        batcher.begin(sizes, version)
        threads = [threading.Thread(target=caller.run, args=(batcher, 25)) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAILSAFE)
        trajectories = [each for name in ("observer_0", "observer_1") for each in batcher.trajectories(name)]
        assert len(trajectories) == 4
        for trajectory, caller in zip(trajectories, callers, strict=True):
            assert_same(trajectory, caller.recorder.trajectory())
            assert trajectory.actions.shape == (25, caller.count)
            assert np.array_equal(trajectory.actions, trajectory.observations[:-1, :, 1] * 10)
            assert trajectory.states.shape == (7, caller.count, 1)
            assert trajectory.states.any()
            states[caller.group] = caller.state
    assert observed == policy.sizes
    assert sum(observed) == 2 * 25 * (1 + 2 + 3 + 4)
    assert max(observed) <= max_batch


def test_a_trajectory_that_has_not_finished_is_none(make: MakeBatcher) -> None:
    batcher = make([A], wait=0)
    result(batcher.submit(A, message(0), False))
    assert batcher.trajectories("observer_0") == []


# ---- the groups' memories


def first_states(batcher: Batcher, group: Group, steps: int = 1) -> list[float]:
    """The states that the rollout under way begins with."""
    for step in range(steps):
        result(batcher.submit(group, message(step), False))
    result(batcher.submit(group, message(9), True))
    numbers = [each.number for each in (A, B) if each.observer == group.observer]
    states: list[float] = batcher.trajectories(group.observer)[numbers.index(group.number)].states[0, :, 0].tolist()
    return states


def test_a_memory_goes_on_from_rollout_to_rollout(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A], wait=0)
    assert first_states(batcher, A, steps=3) == [0, 0]
    batcher.begin(of_two([A]), 1)
    assert first_states(batcher, A) == [3, 3]  # the last call of a rollout is repeated as the next one's first
    batcher.begin(of_two([A]), 2)
    assert first_states(batcher, A) == [4, 4]
    assert policy.refreshed == [2, 2, 2]  # for the policy of each rollout


def test_a_group_that_was_lost_begins_anew(make: MakeBatcher) -> None:
    """Its environments are others when it comes back."""
    batcher = make([A, C], wait=0)
    for group in (A, C):
        result(batcher.submit(group, message(0), False))
    batcher.drop("observer_0")
    batcher.begin(of_two([A, C]), 1)
    assert first_states(batcher, A) == [0, 0]
    result(batcher.submit(C, message(0), False))
    result(batcher.submit(C, message(0), True))
    (trajectory,) = batcher.trajectories("observer_1")
    assert trajectory.states[0].tolist() == [[1], [1]]


def test_an_observer_that_joins_again_has_nothing_of_its_old_groups(make: MakeBatcher) -> None:
    """Its late calls are refused."""
    batcher, again = make([A], wait=0), A._replace(join=4)
    assert first_states(batcher, A, steps=3) == [0, 0]
    batcher.begin(of_two([again]), 1)
    refuse(batcher, A, 0)
    assert first_states(batcher, again) == [0, 0]
    assert len(batcher.trajectories("observer_0")) == 1


def test_a_call_under_way_does_not_advance_a_group_that_begins_anew(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A], wait=0)
    policy.hold()
    stale = batcher.submit(A, message(0), False)
    policy.wait_begun()
    batcher.drop("observer_0")
    batcher.begin(of_two([A]), 1)
    policy.release()
    assert refusal(stale) == "the rollout is over"
    assert first_states(batcher, A) == [0, 0]
