"""The observer: steps environments at the agent's request, with actions from the agent or from the policy it was sent.

Shapes: n are the environments of a group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.rl import RlSettings, calls, envs, model
from rolecall.jobs.rl.envs import Envs, Recorder
from rolecall.jobs.rl.messages import Array, PolicyState, Rollout, Trajectory, pack


def run(context: Context[RlSettings]) -> None:
    """Makes the environments, and steps them from now on whenever the agent calls."""
    calls.observe.set(Observer(context).rollout)


class Observer:
    """The groups of environments, and the policy where it acts here."""

    def __init__(self, context: Context[RlSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        sizes = envs.group_sizes(self.settings)
        self.groups = [Envs(self.settings.env_id, size, context.seed(place)) for place, size in enumerate(sizes)]

    def rollout(self, policy: PolicyState | None, version: int) -> Rollout:
        """One rollout under the policy of `version`, which is given or else at the agent."""
        self.metrics.rl_policy_version.set(version)
        if policy is None:
            self._step_with_agent()
            trajectories = []
        else:
            self._actor.load(policy)
            trajectories = self._step_with_actor(version)
        returns = [value for group in self.groups for value in group.take_returns()]
        self.metrics.rl_episodes.inc(len(returns))
        self.context.report_step(version + 1)
        return Rollout(returns, trajectories)

    def _step_with_agent(self) -> None:
        """A rollout whose actions the agent makes. While it makes one group's, the other group steps."""
        waiting = [self._request(number, last=False) for number in range(len(self.groups))]
        for last in self._steps():
            for number, group in enumerate(self.groups):
                group.step(actions_of(waiting[number]))
                self.metrics.rl_env_steps.inc(len(group.dones))
                waiting[number] = self._request(number, last)
        for answer in waiting:
            actions_of(answer)

    def _request(self, number: int, last: bool) -> Future[Any]:
        """Calls the agent for the actions of group `number`."""
        group, me = self.groups[number], self.context.me.name
        message = pack(group.observations, group.rewards, group.dones)
        return self.context.call(self.context.members[0], calls.act, me, number, message, last)  # type: ignore[no-any-return]

    def _step_with_actor(self, version: int) -> list[Trajectory]:
        """A rollout whose actions are made here. Returns the groups' trajectories."""
        recorders = [Recorder(version) for _ in self.groups]
        for group, recorder in zip(self.groups, recorders, strict=True):
            recorder.see(group.observations, group.rewards, group.dones)
        for _ in self._steps():
            for group, recorder in zip(self.groups, recorders, strict=True):
                with self.context.timer() as timer:
                    actions = self._actor.act(group.observations)
                self.metrics.rl_inference_seconds.observe(timer.seconds)
                self.metrics.rl_inference_batch_observations.observe(len(actions))
                recorder.choose(actions)
                group.step(actions)
                recorder.see(group.observations, group.rewards, group.dones)
                self.metrics.rl_env_steps.inc(len(group.dones))
        return [recorder.trajectory() for recorder in recorders]

    def _steps(self) -> Iterator[bool]:
        """Yields for each step of a rollout, before it is made, whether it is the last one.

        There are at least ROLLOUT_STEPS, and further ones until an episode has ended, up to MAX_ROLLOUT_STEPS.
        """
        last = False
        for step in itertools.count(1):
            if last:
                return
            ended = any(group.returns for group in self.groups)
            last = step >= self.settings.rollout_steps and (ended or step >= envs.MAX_ROLLOUT_STEPS)
            yield last

    @functools.cached_property
    def _actor(self) -> model.Actor:
        return model.Actor(model.build(self.settings, *self.groups[0].spaces), self.context.device)


def actions_of(answer: Future[Any]) -> Array:
    """The actions [n] that the agent answered. Raises what it answered instead."""
    value = answer.wait()
    if isinstance(value, Exception):
        raise value
    return np.frombuffer(value, np.int64)
