"""An environment to be trained in for as long as events go on: CartPole without a reward threshold.

Its episodes are short. A rollout lasts until an episode has ended, and in a new generation all begin at once: under a
good policy for CartPole-v1 a first step takes 500 steps of every environment, seconds that are no recovery's.
"""

from __future__ import annotations

import gymnasium

gymnasium.register(
    "EndlessCartPole-v0",
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
    max_episode_steps=64,
)
