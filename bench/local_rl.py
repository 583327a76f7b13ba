"""The limit: Rolecall's environments, policy and learner in one process, without RPC."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rolecall import config
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.actor import Actor, RecurrentState, TrajectoryBuilder
from rolecall.jobs.rl.defaults import OnPolicy, choose
from rolecall.jobs.rl.messages import Done, Trajectory
from rolecall.jobs.rl.model import build
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.stepping import Envs

CPU = torch.device("cpu")


def stepping(num_envs: int, seconds: float = 5.0) -> float:
    """Steps a second of one group of environments with the policy's actions, on one core, with nothing learned."""
    return _apart(_stepping, num_envs, seconds)


def learning(num_envs: int, groups: int, steps: int, seconds: float = 15.0) -> float:
    """Steps a second, learning included: `groups` of environments one after the other, updates on every core."""
    return _apart(_learning, num_envs, groups, steps, seconds)


def _apart(function: Callable[..., float], *args: Any) -> float:
    # a fresh process: the progress display's thread stays out of it, and no single operation is split over threads
    with (
        patch.dict(os.environ, OMP_NUM_THREADS="1", ALGORITHM="reinforce"),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        return float(pool.submit(function, *args).result(timeout=120))


def _stepping(num_envs: int, seconds: float) -> float:
    torch.set_num_threads(1)
    settings = config.load(RlSettings)
    group = Envs(settings, num_envs, settings.seed)
    actor = Actor(build(settings, group.spaces), CPU)
    state = actor.initial_state(num_envs)
    for _ in range(100):
        group.step(actor.act(group.observations, group.dones, [state]).actions)
    started, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        group.step(actor.act(group.observations, group.dones, [state]).actions)
        group.take_episodes()
        # a step that only resets is no experience
        steps += int(np.count_nonzero(group.dones == Done.CONTINUES))
    return steps / passed


def _learning(num_envs: int, groups: int, steps: int, seconds: float) -> float:
    torch.set_num_threads(1)
    settings = config.load(RlSettings)
    envs = [Envs(settings, num_envs, settings.seed + number) for number in range(groups)]
    choices = choose(settings, envs[0].spaces)
    assert isinstance(choices, OnPolicy)
    model = build(settings, envs[0].spaces, choices)
    learner = Ppo(model, settings, choices, CPU, len(os.sched_getaffinity(0)))
    actor = Actor(learner.model, CPU)
    states = [actor.initial_state(num_envs) for _ in envs]
    started, samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        trajectories = [
            _rollout(group, actor, state, learner.version, steps) for group, state in zip(envs, states, strict=True)
        ]
        learner.update(trajectories)
        samples += sum(trajectory.samples for trajectory in trajectories)
    return samples / passed


def _rollout(group: Envs, actor: Actor, state: RecurrentState, version: int, steps: int) -> Trajectory:
    builder = TrajectoryBuilder(version, state)
    builder.see(group.observations, group.rewards, group.dones)
    for _ in range(steps):
        choice = actor.act(group.observations, group.dones, [state])
        builder.choose(*choice)
        group.step(choice.actions)
        builder.see(group.observations, group.rewards, group.dones)
    group.take_episodes()
    return builder.trajectory()
