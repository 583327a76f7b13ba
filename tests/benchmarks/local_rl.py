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
from rolecall.jobs.rl.envs import Envs, Recorder
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import Done, Trajectory
from rolecall.jobs.rl.model import Actor, build

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
        patch.dict(os.environ, OMP_NUM_THREADS="1"),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        return float(pool.submit(function, *args).result(timeout=120))


def _stepping(num_envs: int, seconds: float) -> float:
    torch.set_num_threads(1)
    settings = config.load(RlSettings)
    group = Envs(settings.env_id, num_envs, settings.seed)
    model = build(settings, *group.spaces).eval()
    actor = Actor(model, CPU)
    for _ in range(100):
        group.step(actor.act(group.observations))
    started, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        group.step(actor.act(group.observations))
        group.take_returns()
        # a step that only resets is no experience
        steps += int(np.count_nonzero(group.dones == Done.CONTINUES))
    return steps / passed


def _learning(num_envs: int, groups: int, steps: int, seconds: float) -> float:
    torch.set_num_threads(1)
    settings = config.load(RlSettings)
    envs = [Envs(settings.env_id, num_envs, settings.seed + number) for number in range(groups)]
    learner = Learner(build(settings, *envs[0].spaces), settings, CPU, len(os.sched_getaffinity(0)))
    actor = Actor(learner.model, CPU)
    started, samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        trajectories = [_rollout(group, actor, learner.version, steps) for group in envs]
        samples += learner.update(trajectories).samples
    return samples / passed


def _rollout(group: Envs, actor: Actor, version: int, steps: int) -> Trajectory:
    recorder = Recorder(version)
    recorder.see(group.observations, group.rewards, group.dones)
    for _ in range(steps):
        actions = actor.act(group.observations)
        recorder.choose(actions)
        group.step(actions)
        recorder.see(group.observations, group.rewards, group.dones)
    group.take_returns()
    return recorder.trajectory()
