"""The batcher: who goes in which forward pass, who is answered what, and who is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from rolecall import PeerLostError
from rolecall.jobs.rl import messages
from rolecall.jobs.rl.actor import Choice, RecurrentState, TrajectoryBuilder
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.messages import Array, Done
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

    def initial_state(self, count: int) -> RecurrentState:
        return RecurrentState(torch.zeros(count, 1), None)

    def refresh(self, state: RecurrentState) -> None:
        self.refreshed.append(len(state.hidden))

    def act(self, observations: Array, dones: Array, states: Sequence[RecurrentState]) -> Choice:
        self.batches.append(observations.copy())
        self.begun.release()
        assert self._go.wait(FAILSAFE)
        if self.error is not None:
            raise self.error
        assert [len(observations)] * 2 == [len(dones), sum(len(state.hidden) for state in states)]
        counted = torch.cat([state.hidden for state in states]) + 1
        after = counted * torch.from_numpy(dones == Done.CONTINUES)[:, None]
        for state, hidden in zip(states, after.split([len(state.hidden) for state in states]), strict=True):
            state.hidden = hidden
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


MakeBatcher = Callable[..., Batcher]


@pytest.fixture
def make(policy: Policy) -> Iterator[MakeBatcher]:
    def make(
        groups: list[Group], version: int = 0, max_batch: int = 1000, wait: float = LONG, observe: Any = None
    ) -> Batcher:
        actor: Any = policy
        batcher = Batcher(actor, (2,), max_batch, wait, observe or (lambda size, seconds: None))
        batcher.begin(of_two(groups), version)
        return batcher

    yield make
    policy.release()


def of_two(groups: list[Group]) -> dict[Group, int]:
    """The groups, of two environments each."""
    return dict.fromkeys(groups, 2)


def submit(batcher: Batcher, group: Group, first: int, last: bool = False) -> Future[Array]:
    """Observations (0, first) and (0, first + 1)."""
    observations = np.array([[0, first], [0, first + 1]], np.float32)
    return batcher.submit(group, observations, np.zeros(2, np.float32), np.zeros(2, np.uint8), last)


def result(answer: Future[Array]) -> Array:
    """The answer; raises what the call ended with, and TimeoutError if it does not end."""
    return answer.result(FAILSAFE)


def refusal(answer: Future[Array]) -> str:
    """What an observer is to raise: not its own failure, but the loss of its peer."""
    error = answer.exception(FAILSAFE)
    assert isinstance(error, PeerLostError)
    return str(error)


def refuse(batcher: Batcher, group: Group, first: int) -> None:
    """The call of `group` is refused."""
    with pytest.raises(PeerLostError, match=f"group {group.number} of {group.observer} is not part of this rollout"):
        submit(batcher, group, first)


def actions(answer: Future[Array]) -> list[int]:
    chosen: list[int] = result(answer).tolist()
    return chosen


A, B, C, D = (Group(f"observer_{observer}", 0, number) for observer in (0, 1) for number in (0, 1))


# ---- who goes together


def test_all_that_are_under_way_go_in_one_forward(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C])
    answers = [submit(batcher, group, 5 * number) for number, group in enumerate([A, B])]
    assert not policy.begun.acquire(timeout=0.1)  # time enough to leave without the third, if it would
    answers.append(submit(batcher, C, 10))
    assert [actions(answer) for answer in answers] == [[0, 10], [50, 60], [100, 110]]
    assert policy.sizes == [6]


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, [2, 2, 2, 2]), (2, [2, 2, 2, 2]), (5, [2, 4, 2]), (6, [2, 6])])
def test_no_more_than_max_batch_go_together(
    make: MakeBatcher, policy: Policy, max_batch: int, sizes: list[int]
) -> None:
    """A group alone may be more than MAX_BATCH: it is not split."""
    batcher = make([A, B, C, D], wait=0, max_batch=max_batch)
    policy.hold()
    first = submit(batcher, A, 0)
    policy.wait_begun()
    answers = [first] + [submit(batcher, group, 0) for group in (B, C, D)]
    policy.release()
    assert [actions(answer) for answer in answers] == [[0, 10]] * 4
    assert policy.sizes == sizes


def test_a_full_batch_leaves_at_once(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D], max_batch=4)
    answers = [submit(batcher, group, 0) for group in (A, B)]
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    assert policy.sizes == [4]


# ---- the deadline, and groups that do not call


def test_a_silent_group_delays_others_until_the_deadline_only(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B], wait=0.05)
    for step in range(3):
        assert actions(submit(batcher, A, step)) == [10 * step, 10 * step + 10]
    assert policy.sizes == [2, 2, 2]


def test_a_dropped_group_delays_no_other(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D])
    answers = [submit(batcher, group, 0) for group in (A, B)]
    batcher.drop("observer_1")
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    assert policy.sizes == [4]


def test_a_group_that_has_finished_is_not_waited_for(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    answers = [submit(batcher, group, 0) for group in (A, B)]
    assert [actions(answer) for answer in answers] == [[0, 10]] * 2
    waiting = submit(batcher, B, 3)
    assert result(submit(batcher, A, 9, last=True)).size == 0
    assert actions(waiting) == [30, 40]
    assert policy.sizes == [4, 2]


# ---- who is refused, and who fails


def test_drop_fails_the_waiting_calls_and_refuses_new_ones(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B, C, D], wait=0)
    policy.hold()
    other = submit(batcher, C, 0)
    policy.wait_begun()
    waiting = [submit(batcher, group, 0) for group in (A, B)]
    batcher.drop("observer_0")
    for answer in waiting:
        assert refusal(answer) == "observer_0 was given up"
    refuse(batcher, A, 0)
    policy.release()
    assert actions(other) == [0, 10]
    assert actions(submit(batcher, D, 1)) == [10, 20]
    assert policy.sizes == [2, 2]


def test_drop_takes_a_finished_trajectory_back(make: MakeBatcher) -> None:
    batcher = make([A, C], wait=0)
    for group in (A, C):
        result(submit(batcher, group, 0))
        result(submit(batcher, group, 1, last=True))
    assert [len(batcher.trajectories(name)) for name in ("observer_0", "observer_1")] == [1, 1]
    batcher.drop("observer_0")
    assert [len(batcher.trajectories(name)) for name in ("observer_0", "observer_1")] == [0, 1]


def test_an_error_of_act_reaches_every_caller_and_the_next_batch_goes_on(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    policy.error = ArithmeticError("the policy is not finite")
    answers = [submit(batcher, group, 0) for group in (A, B)]
    for answer in answers:
        assert repr(answer.exception(FAILSAFE)) == "ArithmeticError('the policy is not finite')"
    policy.error = None
    batcher.begin(of_two([A]), 1)
    assert actions(submit(batcher, A, 2)) == [20, 30]


@pytest.mark.parametrize("group", [Group("observer_9", 0, 0), Group("observer_0", 0, 2), Group("observer_0", 1, 0)])
def test_an_unknown_group_is_refused(make: MakeBatcher, group: Group) -> None:
    refuse(make([A, B]), group, 0)


def test_observations_of_another_shape_are_refused_and_not_recorded(make: MakeBatcher) -> None:
    batcher = make([A], wait=0)
    with pytest.raises(ValueError, match=r"observations of shape \(3,\), not \(2,\)"):
        batcher.submit(A, np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros(2, np.uint8), False)
    result(submit(batcher, A, 0))
    result(submit(batcher, A, 1, last=True))
    assert batcher.trajectories("observer_0")[0].observations.shape == (2, 2, 2)


def test_a_rollout_that_is_over_is_refused(make: MakeBatcher) -> None:
    batcher = make([A, B], wait=0)
    result(submit(batcher, A, 0))
    result(submit(batcher, A, 1, last=True))
    refuse(batcher, A, 2)
    batcher.begin(of_two([B]), 1)
    refuse(batcher, A, 2)
    assert batcher.trajectories("observer_0") == []


def test_begin_fails_what_still_waits(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A, B])
    answer = submit(batcher, A, 0)
    batcher.begin(of_two([A, B]), 1)
    assert refusal(answer) == "the rollout is over"
    assert policy.sizes == []


def test_actions_of_an_old_rollout_do_not_enter_the_new_one(make: MakeBatcher, policy: Policy) -> None:
    batcher = make([A], wait=0)
    policy.hold()
    stale = submit(batcher, A, 0)
    policy.wait_begun()
    batcher.begin(of_two([A]), 1)
    policy.release()
    assert refusal(stale) == "the rollout is over"
    assert actions(submit(batcher, A, 4)) == [40, 50]
    assert result(submit(batcher, A, 5, last=True)).size == 0
    (trajectory,) = batcher.trajectories("observer_0")
    assert trajectory.actions.tolist() == [[40, 50]]
    assert trajectory.version == 1


# ---- what is recorded


class Caller:
    """Calls as an observer does: random steps, each one recorded here too."""

    def __init__(self, group: Group, count: int, version: int, state: torch.Tensor) -> None:
        self.group, self.count, self.hidden = group, count, state
        self.random = np.random.default_rng([sum(map(ord, group.observer)) + group.number, version])
        self.builder = TrajectoryBuilder(version, self)  # type: ignore[arg-type]

    def call(self, batcher: Batcher, last: bool) -> Future[Array]:
        self.seen = (
            self.random.integers(0, 100, (self.count, 2)).astype(np.float32),
            self.random.normal(size=self.count).astype(np.float32),
            self.random.choice([Done.CONTINUES, Done.CONTINUES, Done.TERMINATED, Done.TRUNCATED], self.count).astype(
                np.uint8
            ),
        )
        self.builder.see(*self.seen)
        return batcher.submit(self.group, *self.seen, last)

    def take(self, answer: Future[Array]) -> None:
        observations, _, dones = self.seen
        self.builder.choose(result(answer), observations[:, 0])
        self.hidden = (self.hidden + 1) * torch.from_numpy(dones == Done.CONTINUES)[:, None]

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
            assert_same(trajectory, caller.builder.trajectory())
            assert trajectory.actions.shape == (25, caller.count)
            assert np.array_equal(trajectory.actions, trajectory.observations[:-1, :, 1] * 10)
            assert trajectory.states.shape == (7, caller.count, 1)
            assert trajectory.states.any()
            states[caller.group] = caller.hidden
    assert observed == policy.sizes
    assert sum(observed) == 2 * 25 * (1 + 2 + 3 + 4)
    assert max(observed) <= max_batch


# ---- the groups' memories


def first_states(batcher: Batcher, group: Group, steps: int = 1) -> list[float]:
    """The states that the rollout under way begins with."""
    for step in range(steps):
        result(submit(batcher, group, step))
    result(submit(batcher, group, 9, last=True))
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
    stale = submit(batcher, A, 0)
    policy.wait_begun()
    batcher.drop("observer_0")
    batcher.begin(of_two([A]), 1)
    policy.release()
    assert refusal(stale) == "the rollout is over"
    assert first_states(batcher, A) == [0, 0]
