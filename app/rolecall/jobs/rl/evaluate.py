"""`python -m rolecall eval rl`: the returns of fresh episodes under a saved policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.envs import MAX_ROLLOUT_STEPS, Envs
from rolecall.jobs.rl.messages import Done

EPISODES = 100
SEED_OFFSET = 1_000_003  # episodes that were not trained on


def evaluate(settings: RlSettings, state: dict[str, Any]) -> dict[str, float]:
    """Mean and standard deviation of the return over 100 fresh episodes, one in each of as many environments.

    The policy takes its most probable action.
    """
    with UsageError.wrap("the checkpoint holds no policy of rl", KeyError, TypeError):
        weights = state["learner"]["model"]
    group = Envs(settings.env_id, EPISODES, settings.seed + SEED_OFFSET)
    trained = model.build(settings, *group.spaces)
    trained.load_state_dict(weights)
    actor = model.Actor(trained.eval(), torch.device("cpu"))
    returns = np.zeros(EPISODES)
    running = np.ones(EPISODES, bool)
    for _ in range(MAX_ROLLOUT_STEPS):
        group.step(actor.best(group.observations))
        returns[running] += group.rewards[running]
        running &= group.dones == Done.CONTINUES
        if not running.any():
            break
    group.close()
    return {
        "episodes": float(EPISODES),
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "unfinished_episodes": float(running.sum()),
    }
