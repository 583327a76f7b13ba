"""An environment to be trained in for as long as events go on: CartPole without a reward threshold.

Its episodes are short. A rollout lasts until an episode has ended, and in a new generation all begin at once: under a
good policy for CartPole-v1 a first step takes 500 steps of every environment, seconds that are no recovery's. With
CHAOS_FINISH=1 it is CartPole-v1: a checkpoint depends on the environment's name, which must not change.
"""

from __future__ import annotations

import os

import gymnasium

FINISH = "CHAOS_FINISH"

gymnasium.register(
    "EndlessCartPole-v0",
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
    max_episode_steps=500 if os.environ.get(FINISH) else 64,
    reward_threshold=475 if os.environ.get(FINISH) else None,
)
