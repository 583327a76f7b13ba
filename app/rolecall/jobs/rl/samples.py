"""The samples of an iteration, in columns.

Shapes: T are the steps of a rollout, n the environments of a group, ... is the shape of an observation, A of an action,
S of the state of a recurrent policy. The columns have u units: sequences of L steps, 1 without a recurrent policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rolecall.jobs.rl import messages
from rolecall.jobs.rl.messages import Array, Done, Trajectory
from rolecall.jobs.rl.model import to_tensor


@dataclass
class Samples:
    """observations [u, L, ...], actions [u, L, A]; returns, values and log probabilities (of the policy that acted)
    [u, L]; used [u, L] bool, False for steps that are no experience; states [u, S] before the sequences; ends [u, L]
    bool, after which the state is reset.
    """

    observations: Tensor
    actions: Tensor
    returns: Tensor
    values: Tensor
    log_probabilities: Tensor
    used: Tensor
    states: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, units: Tensor | slice) -> Samples:
        return Samples(*(column[units] for column in vars(self).values()))


def join(parts: Sequence[Samples]) -> Samples:
    """The concatenation of `parts`."""
    if len(parts) == 1:
        return parts[0]
    return Samples(*(torch.cat(column) for column in zip(*(vars(part).values() for part in parts), strict=True)))


def lambda_returns(trajectory: Trajectory, values: Array, gamma: float, decay: float) -> Array:
    """The return [T, n] of each step; minus the value of the step, it is the advantage of GAE (Schulman et al. 2016)
    with the lambda `decay`. With a decay of 1 it is the sum of discounted rewards up to the end of the episode.

    `values` [T+1, n] are the critic's estimates for the observations. If an episode continues beyond the rollout or was
    truncated, the estimate stands for the rewards that would have followed. If it terminated, none follow. The step
    after an end is no experience; its return is the estimate for the last observation of the truncated episode.
    """
    returns = np.empty_like(trajectory.rewards)
    after = values[-1]
    for step in range(len(returns) - 1, -1, -1):
        # with a decay of 1 the values in between have no weight, even if they are infinite
        mixed = after if decay == 1 else decay * after + (1 - decay) * values[step + 1]
        tail = np.where(trajectory.dones[step] == Done.TERMINATED, 0.0, mixed)
        after = np.where(trajectory.experience[step], trajectory.rewards[step] + gamma * tail, values[step])
        returns[step] = after
    return returns


def samples_of(
    trajectory: Trajectory,
    value: Callable[[Tensor, Tensor, Tensor], Tensor],
    gamma: float,
    decay: float,
    device: torch.device,
) -> Samples:
    """A trajectory in sequences, each with the state of the policy before it: of SEQUENCE_STEPS for a recurrent policy,
    otherwise of one step.

    `value` maps observations [u, L, ...], states [u, S] and ends [u, L] to estimates [u, L] of the return. Sequences
    without any experience are left out.
    """
    steps, n = trajectory.rewards.shape
    if trajectory.states.shape[2]:
        states, length = trajectory.states, min(messages.SEQUENCE_STEPS, steps + 1)  # a longer one would be padded
    else:
        states, length = np.zeros((steps + 1, n, 0), np.float32), 1
    count = len(states)

    def cut(column: Array) -> Array:
        """Reshapes [up to T+1, n, ...] to [u, L, ...], padded with zeros."""
        padded = np.zeros((count * length, *column.shape[1:]), column.dtype)
        padded[: len(column)] = column
        by_sequence = padded.reshape(count, length, *column.shape[1:]).swapaxes(1, 2)
        return by_sequence.reshape(count * n, length, *column.shape[2:])

    observations = to_tensor(cut(trajectory.observations), device)
    before = torch.from_numpy(states).flatten(0, 1).to(device)
    experience = cut(trajectory.experience)
    ends = torch.from_numpy(~experience).to(device)
    values = value(observations, before, ends)
    by_step = values.cpu().numpy().reshape(count, n, length).swapaxes(1, 2).reshape(count * length, n)
    returns = lambda_returns(trajectory, by_step[: steps + 1], gamma, decay)
    whole = Samples(
        observations=observations,
        actions=torch.from_numpy(cut(trajectory.actions)).to(device),
        returns=torch.from_numpy(cut(returns)).to(device),
        values=values,
        log_probabilities=torch.from_numpy(cut(trajectory.log_probabilities)).to(device),
        used=torch.from_numpy(experience).to(device),
        states=before,
        ends=ends,
    )
    return whole[whole.used.any(1).nonzero().squeeze(-1)]
