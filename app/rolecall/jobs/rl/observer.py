"""The observer: steps environments. The agent creates it, commands its rollouts, and is called back for actions."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import rpc

from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.envs import Arrays, Envs, Recorder, pack

START_SECONDS = 30.0
_world: Future[Context] = Future()
_failure: queue.Queue[BaseException] = queue.Queue()


def run(context: Context) -> None:
    """Serve the agent until the process is ended; raise what a rollout raised."""
    _world.set_result(context)
    raise _failure.get()  # bounded by the supervisor, which ends this process


@dataclass(frozen=True)
class Rollout:
    """What a rollout brought: steps of each environment, the returns of the episodes that ended in it, and, where the
    observer itself acted, the trajectories' arrays.
    """

    steps: int
    returns: list[float]
    trajectories: list[Arrays]


class Observer:
    """`NUM_ENVS` environments, in two groups where there are two, so that one steps while the other's actions are made.

    `agent` is the agent's RRef; whoever owns it is called for actions.
    """

    def __init__(self, agent: rpc.RRef[Any]) -> None:
        # RPC serves from before `run` is called: the agent may be a moment early
        self.context = _world.result(START_SECONDS)
        settings = self.context.settings
        assert isinstance(settings, RlSettings)
        self.settings = settings
        self.agent = agent.owner_name()
        sizes = group_sizes(settings)
        seeds = np.random.SeedSequence((settings.seed, self.context.me.ordinal, self.context.generation))
        states = seeds.generate_state(len(sizes))
        self.groups = [Envs(settings.env_id, n, int(s)) for n, s in zip(sizes, states, strict=True)]
        self._actor: model.Actor | None = None

    def rollout(self, policy: dict[str, torch.Tensor] | None, version: int) -> Rollout:
        """Step all environments at least ROLLOUT_STEPS times and until an episode has ended, at most MAX_ROLLOUT_STEPS.

        With `policy`, a state to act with, the trajectories are returned; without, the agent makes all actions.
        """
        self.context.metrics.rl_policy_version.set(version)
        steps = self._step_with(policy, version) if policy is not None else self._step_with_agent()
        returns = [value for group in self.groups for value in group.take_returns()]
        self.context.metrics.rl_episodes.inc(len(returns))
        self.context.report(version + 1)
        trajectories = [recorder.trajectory().arrays() for recorder in self._recorders] if policy is not None else []
        return Rollout(steps, returns, trajectories)

    def _over(self, steps: int) -> bool:
        """Whether the step after `steps` ones is the rollout's last."""
        ended = any(group.returns for group in self.groups)
        return steps + 1 >= self.settings.rollout_steps and (ended or steps + 1 >= self.settings.max_rollout_steps)

    def _step_with_agent(self) -> int:
        waiting = [self._ask(number, last=False) for number in range(len(self.groups))]
        steps, last = 0, False
        while not last:
            last = self._over(steps)
            for number, group in enumerate(self.groups):
                group.step(np.frombuffer(self._answer(waiting[number]), np.int64))
                self._count(group)
                waiting[number] = self._ask(number, last)
            steps += 1
        for answer in waiting:
            self._answer(answer)
        return steps

    @staticmethod
    def _answer(call: torch.futures.Future[Any]) -> bytes:
        """The actions that the agent answered; raises what it answered instead."""
        answer = call.wait()
        if isinstance(answer, Exception):
            raise answer
        return cast(bytes, answer)

    def _ask(self, number: int, last: bool) -> torch.futures.Future[Any]:
        from rolecall.jobs.rl.agent import act

        group = self.groups[number]
        message = pack(group.observations, group.rewards, group.ends)
        return rolecall_rpc.call(self.agent, act, self.context.me.name, number, message, last)

    def _step_with(self, policy: dict[str, torch.Tensor], version: int) -> int:
        actor = self._load(policy)
        self._recorders = [Recorder(version) for _ in self.groups]
        metrics = self.context.metrics
        for group, recorder in zip(self.groups, self._recorders, strict=True):
            recorder.see(group.observations, group.rewards, group.ends)
        steps, last = 0, False
        while not last:
            last = self._over(steps)
            for group, recorder in zip(self.groups, self._recorders, strict=True):
                started = time.perf_counter()
                actions = actor.act(group.observations)
                metrics.rl_inference_seconds.observe(time.perf_counter() - started)
                metrics.rl_inference_batch_observations.observe(len(actions))
                recorder.choose(actions)
                group.step(actions)
                recorder.see(group.observations, group.rewards, group.ends)
                self._count(group)
            steps += 1
        return steps

    def _count(self, group: Envs) -> None:
        self.context.metrics.rl_env_steps.inc(len(group.ends))

    def _load(self, policy: dict[str, torch.Tensor]) -> model.Actor:
        if self._actor is None:
            spaces = self.groups[0].spaces
            self._actor = model.Actor(model.build(self.settings, *spaces), self.context.device)
        self._actor.model.policy.load_state_dict(policy)
        self._actor.model.eval()
        return self._actor


def group_sizes(settings: RlSettings) -> list[int]:
    """Environments in each group: two groups where another process makes the actions meanwhile, else one."""
    count = settings.num_envs
    return [count] if count == 1 or settings.inference == "observer" else [count - count // 2, count // 2]


def rollout(observer: rpc.RRef[Observer], policy: dict[str, torch.Tensor] | None, version: int) -> Rollout | None:
    """Called by the agent, with its RRef, where the observer lives. None where that is of no more use: its supervisor
    tells the gang why."""
    try:
        found: Rollout = observer.local_value().rollout(policy, version)
        return found
    except Exception as error:  # `run` raises it
        _failure.put(error)
        return None
