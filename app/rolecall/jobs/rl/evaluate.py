"""`python -m rolecall eval rl`: the returns of fresh episodes under a saved policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rolecall.config import UsageError
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.envs import GOES_ON, Envs

EPISODES = 100


def evaluate(settings: RlSettings, state: dict[str, Any]) -> dict[str, float]:
    """Mean and standard deviation of the return over 100 fresh episodes, one in each of as many environments.

    The policy takes its most probable action. ENV_ID, POLICY and HIDDEN_SIZE are the checkpoint's.
    """
    try:
        settings = settings.model_copy(update=state["settings"])
        weights = state["learner"]["model"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"the checkpoint holds no policy of rl (no {error})") from error
    group = Envs(settings.env_id, EPISODES, settings.seed + 1_000_003)  # not the seeds that were trained on
    trained = model.build(settings, *group.spaces)
    trained.load_state_dict(weights)
    actor = model.Actor(trained.eval(), torch.device("cpu"))
    returns = np.zeros(EPISODES)
    going = np.ones(EPISODES, bool)
    for _ in range(settings.max_rollout_steps):
        group.step(actor.best(group.observations))
        returns[going] += group.rewards[going]
        going &= group.ends == GOES_ON
        if not going.any():
            break
    group.close()
    return {
        "episodes": float(EPISODES),
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "unfinished_episodes": float(going.sum()),
    }
