"""What ends an observer: the errors of its environments, and the loss of the agent."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from rolecall import PeerLostError
from rolecall.jobs.rl.stepping import BrokenEnvError
from tests.jobs.rl_parts import Ranks


@pytest.mark.parametrize("inference", ["agent", "observer"])
@pytest.mark.parametrize(
    "error", [BrokenEnvError("broken"), PeerLostError("gone"), ArithmeticError("not finite")], ids=repr
)
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


def test_a_call_that_the_agent_refuses_ends_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(env_id="CartPole-v1", num_envs=2, rollout_steps=2, inference="agent") as ranks:
        ended: list[Exception] = []
        monkeypatch.setattr(ranks.context.supervision, "fail", ended.append)
        ranks.rollout()
        with pytest.raises(PeerLostError, match="not part of this rollout"):
            ranks.observer.rollout(None, 1)  # which the agent has not begun
        assert [type(error) for error in ended] == [PeerLostError]
