"""Returns of the steps of a trajectory. Shapes: T are the steps of a rollout, n the environments of a group."""

from __future__ import annotations

import numpy as np

from rolecall.jobs.rl.messages import Array, Done, Trajectory


def lambda_returns(trajectory: Trajectory, values: Array, gamma: float, decay: float) -> Array:
    """The return [T, n] of each step; less the step's value, it is GAE's advantage (Schulman et al. 2016) with the
    lambda `decay`. With a decay of 1 it is the sum of discounted rewards up to the episode's end.

    `values` [T+1, n] are the critic's estimates for the observations. Where an episode continues beyond the rollout,
    or was truncated, the estimate there stands for the rewards that would have followed. Where it terminated, none
    follow. The step after an end is no experience; its return is the estimate for the truncated episode's last
    observation.
    """
    returns = np.empty_like(trajectory.rewards)
    after = values[-1]
    for step in range(len(returns) - 1, -1, -1):
        # with a decay of 1 the values in between count nothing, whatever they are
        mixed = after if decay == 1 else decay * after + (1 - decay) * values[step + 1]
        tail = np.where(trajectory.dones[step] == Done.TERMINATED, 0.0, mixed)
        after = np.where(trajectory.experience[step], trajectory.rewards[step] + gamma * tail, values[step])
        returns[step] = after
    return returns
