"""Chooses actions for observations, and records the trajectories of environments.

Shapes: n are environments, ... an observation's own shape, A an action's, S a recurrent policy's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rolecall.jobs.rl import messages
from rolecall.jobs.rl.messages import Array, Done, PolicyState, Trajectory
from rolecall.jobs.rl.model import ActorCritic, to_tensor


@dataclass
class RecurrentState:
    """The values that n environments carry from step to step: `hidden` [n, S] (S is 0 without a recurrent policy), and
    the `noise` [n, ...] of gSDE, or None. The rank that computes actions holds it.
    """

    hidden: Tensor
    noise: Tensor | None


class Choice(NamedTuple):
    """Actions [n, A] and their log probabilities [n] float32."""

    actions: Array
    log_probabilities: Array


class Actor:
    """Chooses actions with the policy of a model."""

    def __init__(self, model: ActorCritic, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.device = device

    def load(self, policy: PolicyState) -> None:
        """Replaces the policy by a `policy_state` of another model."""
        self.model.load_state_dict(policy, strict=False)  # it has no baseline

    def initial_state(self, count: int) -> RecurrentState:
        """The state of `count` environments before their first step."""
        hidden = torch.zeros(count, self.model.state_size, device=self.device)
        return RecurrentState(hidden, self.model.actions.draw(count))

    def refresh(self, state: RecurrentState) -> None:
        """Draws new noise at the start of a rollout, because the policy has changed."""
        if state.noise is not None:
            state.noise = self.model.actions.draw(len(state.hidden))

    @torch.inference_mode()
    def act(self, observations: Array, dones: Array, states: Sequence[RecurrentState]) -> Choice:
        """Samples an action for each of the observations [n, ...]; `dones` [n] are of the steps that led to them.

        The states are those of the environments in order, and are advanced. After the last observation of an episode
        the state is the initial one, because the next observation is the first of the next episode.
        """
        parameters = self._parameters(observations, dones, states)
        noises = [state.noise for state in states if state.noise is not None]
        actions = self.model.actions.sample(parameters, _join(noises) if noises else None)
        log_probabilities = self.model.actions.log_probability(parameters, actions)
        return Choice(actions.cpu().numpy(), log_probabilities.cpu().numpy())

    @torch.inference_mode()
    def best(self, observations: Array, dones: Array, state: RecurrentState) -> Array:
        """The most probable action for each of the observations; otherwise as `act`."""
        actions: Array = self.model.actions.best(self._parameters(observations, dones, [state])).cpu().numpy()
        return actions

    def _parameters(self, observations: Array, dones: Array, states: Sequence[RecurrentState]) -> Tensor:
        rows = to_tensor(observations, self.device)
        parameters, hidden = self.model.act(rows, _join([state.hidden for state in states]))
        if self.model.state_size:
            goes_on = torch.from_numpy(dones == Done.CONTINUES).to(self.device)
            after = (hidden * goes_on[:, None]).split([len(state.hidden) for state in states])
            for state, advanced in zip(states, after, strict=True):
                state.hidden = advanced
        return parameters


class TrajectoryBuilder:
    """Builds a `Trajectory` from the observations before and the actions of each step.

    `Actor.act` advances the `state` of the environments, which is recorded every SEQUENCE_STEPS.
    """

    def __init__(self, version: int, state: RecurrentState) -> None:
        self.version, self.state = version, state
        self._seen: list[tuple[Array, Array, Array]] = []
        self._chosen: list[tuple[Array, Array]] = []
        self._states: list[Array] = []

    def see(self, observations: Array, rewards: Array, dones: Array) -> None:
        """Records the newest observations [n, ...], and the rewards and dones [n] of the step that led to them."""
        if len(self._chosen) % messages.SEQUENCE_STEPS == 0:
            self._states.append(self.state.hidden.cpu().numpy())
        self._seen.append((observations, rewards, dones))

    def choose(self, actions: Array, log_probabilities: Array) -> None:
        """Records the actions [n, A] for the newest observations, and their log probabilities [n]."""
        self._chosen.append((actions, log_probabilities))

    def trajectory(self) -> Trajectory:
        """The recorded trajectory. Raises ValueError unless the observations after the last action were recorded."""
        steps = len(self._chosen)
        if not steps or len(self._seen) != steps + 1:
            raise ValueError(f"{len(self._seen)} observations for {steps} actions")
        observations, rewards, dones = (np.stack(column) for column in zip(*self._seen, strict=True))
        actions, log_probabilities = (np.stack(column) for column in zip(*self._chosen, strict=True))
        return Trajectory(
            observations=observations,
            actions=actions,
            log_probabilities=log_probabilities,
            rewards=rewards[1:],
            dones=dones[1:],
            experience=dones[:-1] == Done.CONTINUES,  # a step after the end of an episode only resets
            states=np.stack(self._states),
            version=self.version,
        )


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
