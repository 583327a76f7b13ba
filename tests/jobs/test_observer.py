"""What ends an observer: the errors of its environments, and the loss of the agent."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from rolecall import PeerLostError
from rolecall.jobs.rl.stepping import BrokenEnvError
from tests.context.contexts import value
from tests.jobs.rl_parts import Ranks


@pytest.mark.parametrize("inference", ["agent", "observer"])
@pytest.mark.parametrize("error", [BrokenEnvError("broken"), ArithmeticError("not finite")], ids=repr)
def test_an_error_in_a_rollout_ends_the_observer(
    monkeypatch: pytest.MonkeyPatch, inference: Any, error: Exception
) -> None:
    with Ranks(env_id="CartPole-v1", num_envs=2, rollout_steps=2, inference=inference) as ranks:
        ended: list[Exception] = []
        monkeypatch.setattr(ranks.context.supervision, "fail", ended.append)
        ranks.rollout()
        assert ended == []
        monkeypatch.setattr(ranks.observer.groups[0], "step", MagicMock(side_effect=error))
        with pytest.raises(type(error)):
            ranks.rollout()
        assert ended == [error]


class Lost:
    """In place of the wire: answers `calls` calls by `inner`, and fails the others, as if the agent had ended."""

    def __init__(self, inner: Any, calls: int) -> None:
        self.inner, self.left = inner, calls

    def call(self, *args: Any, **_: Any) -> Future[bytes]:
        self.left -= 1
        if self.left >= 0:
            answer: Future[bytes] = self.inner.call(*args)
            return answer
        answer = Future()
        answer.set_exception(PeerLostError("generation 1 has ended"))
        return answer


def interrupted(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """A rollout whose agent is lost after it has answered so many calls."""
    with monkeypatch.context() as patch:
        patch.setattr(ranks.context.group, "transport", Lost(ranks.context.group.transport, calls))
        with pytest.raises(PeerLostError):
            ranks.rollout()


def steps_and_episodes(ranks: Ranks) -> tuple[float, float]:
    return value(ranks.context.metrics.rl_env_steps), value(ranks.context.metrics.rl_episodes)


def test_the_loss_of_the_agent_ends_a_rollout_and_not_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments are where they are, each step and each episode counts once, and those of the interrupted
    rollout are in no other."""
    with Ranks(env_id="CartPole-v1", num_envs=4, rollout_steps=60, inference="agent") as ranks:
        ended: list[Exception] = []
        monkeypatch.setattr(ranks.context.supervision, "fail", ended.append)
        first = ranks.rollout()
        interrupted(ranks, monkeypatch, calls=101)  # 50 steps of a group, and 49 of the other
        assert ended == []
        shown = [group.observations for group in ranks.observer.groups]
        assert any(group.episodes for group in ranks.observer.groups)
        ranks.batcher.drop(ranks.context.me.name)  # as a new agent knows nothing of it
        again = ranks.rollout()
        for trajectory, observations in zip(again[1], shown, strict=True):
            assert np.array_equal(trajectory.observations[0], observations)
            assert len(trajectory.rewards) == 60
        ends = [int(trajectory.dones.astype(bool).sum()) for _, each in (first, again) for trajectory in each]
        assert [len(first[0]), len(again[0])] == [sum(ends[:2]), sum(ends[2:])]
        steps, episodes = steps_and_episodes(ranks)
        assert steps == sum(group._steps * 2 for group in ranks.observer.groups)
        assert episodes == sum(group._episode.sum() - 2 for group in ranks.observer.groups)


@pytest.mark.parametrize(("memory", "anew"), [("none", False), ("lstm", True)])
def test_episodes_begin_anew_if_the_agent_took_the_policys_state_with_it(
    monkeypatch: pytest.MonkeyPatch, memory: Any, anew: bool
) -> None:
    with Ranks(env_id="CartPole-v1", num_envs=2, rollout_steps=3, inference="agent", memory=memory) as ranks:
        ranks.rollout()
        interrupted(ranks, monkeypatch, calls=3)  # two steps of the first group, and one of the second
        ranks.batcher.drop(ranks.context.me.name)
        monkeypatch.setattr(type(ranks.context), "generation", 2, raising=False)
        ranks.context.generation = 2
        ranks.rollout()
        steps = [int(group._steps - group._start[0]) for group in ranks.observer.groups]
        assert steps == ([3, 3] if anew else [3 + 2 + 3, 3 + 1 + 3])


def test_a_call_that_the_agent_refuses_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has given the observer up, and the gang replaces it."""
    with Ranks(env_id="CartPole-v1", num_envs=2, rollout_steps=2, inference="agent") as ranks:
        ended: list[Exception] = []
        monkeypatch.setattr(ranks.context.supervision, "fail", ended.append)
        ranks.rollout()
        with pytest.raises(PeerLostError, match="not part of this rollout"):
            ranks.observer.rollout(None, 1, 2)  # which the agent has not begun
        assert ended == []
