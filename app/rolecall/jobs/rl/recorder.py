"""Makes trajectories of what is seen and chosen, step by step."""

from __future__ import annotations

import numpy as np

from rolecall.jobs.rl.actor import Memory
from rolecall.jobs.rl.messages import Array, Done, Trajectory


class Recorder:
    """Builds a `Trajectory` from what is seen before and chosen at each step.

    `memory` is the environments' own, which `Actor.act` advances; its state is kept each `every` steps.
    Shapes: n are the environments, ... an observation's own shape, A an action's.
    """

    def __init__(self, version: int, memory: Memory, every: int) -> None:
        self.version, self.memory, self._every = version, memory, every
        self._seen: list[tuple[Array, Array, Array]] = []
        self._chosen: list[tuple[Array, Array]] = []
        self._states: list[Array] = []

    def see(self, observations: Array, rewards: Array, dones: Array) -> None:
        """Takes what the environments show now, [n, ...], and the rewards and dones [n] of the step that led here."""
        if len(self._chosen) % self._every == 0:
            self._states.append(self.memory.state.cpu().numpy())
        self._seen.append((observations, rewards, dones))

    def choose(self, actions: Array, log_probabilities: Array) -> None:
        """Takes the actions [n, A] for what was seen last, and their log probabilities [n]."""
        self._chosen.append((actions, log_probabilities))

    def trajectory(self) -> Trajectory:
        """All of it. Raises ValueError unless the observations after the last action were seen."""
        steps = len(self._chosen)
        if not steps or len(self._seen) != steps + 1:
            raise ValueError(f"{len(self._seen)} observations for {steps} actions")
        observations, rewards, dones = (np.stack(column) for column in zip(*self._seen, strict=True))
        actions, log_probabilities = (np.stack(column) for column in zip(*self._chosen, strict=True))
        # a row is experience unless the step that led to it ended an episode
        experience = dones[:-1] == Done.CONTINUES
        states = np.stack(self._states)
        return Trajectory(
            observations, actions, log_probabilities, rewards[1:], dones[1:], experience, states, self.version
        )
