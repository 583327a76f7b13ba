"""The observer: steps environments when the agent requests it, with actions of the agent or of a policy that it got.

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
from rolecall.jobs.rl.actor import Actor, Memory, Recorder
from rolecall.jobs.rl.batching import Group
from rolecall.jobs.rl.defaults import choose
from rolecall.jobs.rl.messages import Array, Episode, PolicyState, Rollout, Trajectory, pack
from rolecall.jobs.rl.stepping import BrokenEnvError, Envs


def run(context: Context[RlSettings]) -> None:
    """Makes the environments; calls of the agent step them from now on."""
    calls.observe.set(Observer(context).rollout)


class Observer:
    """The groups of environments, and the policy if this rank computes actions."""

    def __init__(self, context: Context[RlSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.choices = choose(self.settings, envs.describe(self.settings).spaces)
        sizes = envs.group_sizes(self.choices.num_envs, self.settings.inference)
        self.groups = [
            Envs(self.settings, size, context.seed(place), first=sum(sizes[:place]), on_hang=context.fail)
            for place, size in enumerate(sizes)
        ]
        self.spaces = self.groups[0].spaces

    def rollout(self, policy: PolicyState | None, version: int) -> Rollout:
        """One rollout under the policy of `version`; without a `policy`, the agent has it."""
        try:
            return self._rollout(policy, version)
        except BrokenEnvError as error:  # its text is one line; the traceback of its cause is for debugging
            self.context.logger.debug(str(error), exc_info=error.__cause__ or False)
            raise

    def _rollout(self, policy: PolicyState | None, version: int) -> Rollout:
        self.metrics.rl_policy_version.set(version)
        if policy is None:
            self._step_with_agent()
            trajectories = []
        else:
            self._actor.load(policy)
            trajectories = self._step_with_actor(version)
        episodes = [Episode(*episode) for group in self.groups for episode in group.take_episodes()]
        self.metrics.rl_episodes.inc(len(episodes))
        self.context.report_step(version + 1)
        return Rollout(episodes, trajectories)

    def _step_with_agent(self) -> None:
        """A rollout with actions of the agent. While the agent computes those of one group, the other group steps."""
        waiting = [self._request(number, last=False) for number in range(len(self.groups))]
        for last in self._steps():
            for number, group in enumerate(self.groups):
                group.step(self._actions(waiting[number]))
                self.metrics.rl_env_steps.inc(len(group.dones))
                waiting[number] = self._request(number, last)
        for answer in waiting:
            self._actions(answer)

    def _request(self, number: int, last: bool) -> Future[Any]:
        """Calls the agent for the actions of group `number`."""
        group, key = self.groups[number], Group(self.context.me.name, number)
        message = pack(group.observations, group.rewards, group.dones)
        return self.context.call(self.context.members[0], calls.act, key, message, last)  # type: ignore[no-any-return]

    def _actions(self, answer: Future[Any]) -> Array:
        """The actions [n, A] of the agent's answer. Raises the exception if the answer is one."""
        value = answer.wait()
        if isinstance(value, Exception):
            raise value
        return np.frombuffer(value, self.spaces.action_dtype).reshape(-1, *self.spaces.action_shape)

    def _step_with_actor(self, version: int) -> list[Trajectory]:
        """A rollout with actions that this rank computes. Returns the trajectories of the groups."""
        for memory in self._memories:
            self._actor.refresh(memory)
        recorders = [Recorder(version, memory) for memory in self._memories]
        for group, recorder in zip(self.groups, recorders, strict=True):
            recorder.see(group.observations, group.rewards, group.dones)
        for _ in self._steps():
            for group, recorder in zip(self.groups, recorders, strict=True):
                with self.context.timer() as timer:
                    choice = self._actor.act(group.observations, group.dones, [recorder.memory])
                self.metrics.rl_inference_seconds.observe(timer.seconds)
                self.metrics.rl_inference_batch_observations.observe(len(group.dones))
                recorder.choose(*choice)
                group.step(choice.actions)
                recorder.see(group.observations, group.rewards, group.dones)
                self.metrics.rl_env_steps.inc(len(group.dones))
        return [recorder.trajectory() for recorder in recorders]

    def _steps(self) -> Iterator[bool]:
        """Yields before each step of a rollout whether it is the last one.

        A rollout has ROLLOUT_STEPS. The tutorial's policy gradient learns from whole returns, so its rollouts go on
        until an episode has ended, up to MAX_ROLLOUT_STEPS.
        """
        last = False
        for step in itertools.count(1):
            if last:
                return
            ended = self.settings.algorithm != "reinforce" or any(group.returns for group in self.groups)
            last = step >= self.choices.rollout_steps and (ended or step >= envs.MAX_ROLLOUT_STEPS)
            yield last

    @functools.cached_property
    def _actor(self) -> Actor:
        return Actor(model.build(self.settings, self.spaces, self.choices), self.context.device)

    @functools.cached_property
    def _memories(self) -> list[Memory]:
        return [self._actor.remember(len(group.dones)) for group in self.groups]
