"""The observer: steps environments at the agent's request, with actions from the agent or from the policy it was sent.

Shapes: n are the environments of a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.rl import RlSettings, calls, envs, model
from rolecall.jobs.rl.envs import Envs, Recorder
from rolecall.jobs.rl.messages import Array, Rollout, Trajectory, pack


def run(context: Context[RlSettings]) -> None:
    """Makes one rollout after another, until the process is ended."""
    settings, metrics = context.settings, context.metrics
    sizes = envs.group_sizes(settings)
    seeds = np.random.SeedSequence((settings.seed, context.me.ordinal, context.generation)).generate_state(len(sizes))
    groups = [Envs(settings.env_id, size, int(seed)) for size, seed in zip(sizes, seeds, strict=True)]
    actor: model.Actor | None = None
    requests = calls.requests.set(SimpleQueue())
    while True:
        request = requests.get()  # bounded by the supervisor, which ends this process
        metrics.rl_policy_version.set(request.version)
        if request.policy is None:
            step_with_agent(context, groups)
            trajectories = list[Trajectory]()
        else:
            actor = actor or model.Actor(model.build(settings, *groups[0].spaces), context.device)
            actor.load(request.policy)
            trajectories = step_with_actor(context, groups, actor, request.version)
        returns = [value for group in groups for value in group.take_returns()]
        metrics.rl_episodes.inc(len(returns))
        context.report_step(request.version + 1)
        request.answer.set_result(Rollout(returns, trajectories))


def step_with_agent(context: Context[RlSettings], groups: Sequence[Envs]) -> None:
    """A rollout whose actions the agent makes. While it makes one group's, the other group steps."""
    agent = context.members[0].name

    def request(number: int, last: bool) -> Future[Any]:
        group = groups[number]
        message = pack(group.observations, group.rewards, group.dones)
        return context.call(agent, calls.act, context.me.name, number, message, last)  # type: ignore[no-any-return]

    waiting = [request(number, last=False) for number in range(len(groups))]
    for last in rollout_steps(context.settings, groups):
        for number, group in enumerate(groups):
            group.step(actions_of(waiting[number]))
            context.metrics.rl_env_steps.inc(len(group.dones))
            waiting[number] = request(number, last)
    for answer in waiting:
        actions_of(answer)


def actions_of(answer: Future[Any]) -> Array:
    """The actions [n] that the agent answered. Raises what it answered instead."""
    value = answer.wait()
    if isinstance(value, Exception):
        raise value
    return np.frombuffer(value, np.int64)


def step_with_actor(
    context: Context[RlSettings], groups: Sequence[Envs], actor: model.Actor, version: int
) -> list[Trajectory]:
    """A rollout whose actions `actor` makes here, with the policy of `version`. Returns the groups' trajectories."""
    metrics = context.metrics
    recorders = [Recorder(version) for _ in groups]
    for group, recorder in zip(groups, recorders, strict=True):
        recorder.see(group.observations, group.rewards, group.dones)
    for _ in rollout_steps(context.settings, groups):
        for group, recorder in zip(groups, recorders, strict=True):
            with context.timer() as timer:
                actions = actor.act(group.observations)
            metrics.rl_inference_seconds.observe(timer.seconds)
            metrics.rl_inference_batch_observations.observe(len(actions))
            recorder.choose(actions)
            group.step(actions)
            recorder.see(group.observations, group.rewards, group.dones)
            metrics.rl_env_steps.inc(len(group.dones))
    return [recorder.trajectory() for recorder in recorders]


def rollout_steps(settings: RlSettings, groups: Sequence[Envs]) -> Iterator[bool]:
    """Yields for each step of a rollout, before it is made, whether it is the last one.

    There are at least ROLLOUT_STEPS, and further ones until an episode has ended, up to MAX_ROLLOUT_STEPS.
    """
    last = False
    for step in itertools.count(1):
        if last:
            return
        ended = any(group.returns for group in groups)
        last = step >= settings.rollout_steps and (ended or step >= envs.MAX_ROLLOUT_STEPS)
        yield last
