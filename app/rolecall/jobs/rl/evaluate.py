"""`rolecall eval rl`: the returns of new episodes under a saved policy, and a video of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.actor import Actor
from rolecall.jobs.rl.defaults import choose
from rolecall.jobs.rl.envs import spec_of
from rolecall.jobs.rl.messages import Array, Done
from rolecall.jobs.rl.processes import play_each
from rolecall.jobs.rl.spaces import Spaces
from rolecall.jobs.rl.stepping import MAX_SEED, Envs, abandon
from rolecall.jobs.rl.video import FilmedEnv, Video
from rolecall.jobs.support import choose_device, progress, seed_generators

SEED_OFFSET = 1_000_003  # gives episodes that were not trained on
# stepped together; a constant, because an episode's numbers depend on the batch that its observations are in
GROUP_SIZE = 10
GPU_GROUP_SIZE = 100
MAX_EPISODE_STEPS = 30_000  # more than ALE's 27,000; ends episodes that would not end


def evaluate(
    settings: RlSettings,
    state: dict[str, Any],
    *,
    episodes: Annotated[int, Field(ge=1, le=1_000_000, description="how many")] = 100,
    envs: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description=f"environments at once, rounded up to a multiple of {GROUP_SIZE}, which share a process; "
            f"empty: {GROUP_SIZE} for each of THREADS, or for each core",
        ),
    ] = None,
    deterministic: Annotated[
        bool, Field(description="take the most probable action; otherwise sample it, as in training")
    ] = True,
    video: Annotated[Path | None, Field(description="show the first one in FILE.mp4 or FILE.gif")] = None,
) -> dict[str, float]:
    """The returns and lengths of `episodes` new episodes, which do not depend on `envs`.

    Each has a separate environment: if environments were used again, short episodes would count more. An episode that
    has not ended after MAX_EPISODE_STEPS counts as it is then. On a GPU, one process plays groups of GPU_GROUP_SIZE.
    Raises UsageError, BrokenEnvError, and ProgramError if the policy raises in another process.
    """
    device, seed = choose_device(settings.device, "DEVICE"), settings.seed + SEED_OFFSET
    if device.type != "cpu" and envs is not None:
        raise UsageError(f"--envs: the policy runs on {device.type}, in one process; leave it out, or set DEVICE=cpu")
    first = 0 if video is None else 1  # of those that are not filmed
    size = GROUP_SIZE if device.type == "cpu" else GPU_GROUP_SIZE
    groups = [range(number, min(number + size, episodes)) for number in range(first, episodes, size)]
    wanted = 1 if device.type != "cpu" else settings.cpu_threads if envs is None else math.ceil(envs / size)
    processes = max(1, min(wanted, len(groups)))
    if processes > 1:  # here: C++ that is being imported does not bear the signal that ends a process
        with UsageError.wrap(f"ENV_ID={settings.env_id}: cannot be made"):
            spec_of(settings.env_id)
    shared = settings.model_copy(update={"threads": max(1, settings.cpu_threads // processes)})

    def play_in(group: Envs) -> Played:
        # on a busy machine torch's threads wait for each other: with two, a step in Boxing took ten times as long
        torch.set_num_threads(1)
        trained = restore(settings, group.spaces, state)
        held = None if deterministic else choose(settings, group.spaces).rollout_steps
        played = _play(Actor(trained, device), group, held)
        group.close()
        return played

    def play(numbers: range, on_hang: Callable[[str], None] = abandon) -> Played:
        seed_generators((seed + numbers.start) % MAX_SEED)  # a fork has its parent's
        return play_in(Envs(shared, len(numbers), seed + numbers.start, numbers.start, on_hang))

    played = dict[int, Played]()
    with progress("evaluating", episodes, "episodes") as advance:
        if video is not None:
            seed_generators(seed % MAX_SEED)
            with Video(video) as film:
                played[0] = play_in(FilmedEnv(settings, seed, film))
            advance(1)
        results = ((numbers, play(numbers)) for numbers in groups)
        with closing(play_each(groups, processes, play) if processes > 1 else results) as each:
            for numbers, result in each:
                played[numbers.start] = result
                advance(len(numbers))
    returns, lengths, ended = (
        np.concatenate(column) for column in zip(*(played[number] for number in sorted(played)), strict=True)
    )
    return {
        "episodes": episodes,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "min_return": float(returns.min()),
        "max_return": float(returns.max()),
        "mean_length": float(lengths.mean()),
        "unfinished_episodes": int((~ended).sum()),
    }


def restore(settings: RlSettings, spaces: Spaces, state: dict[str, Any]) -> model.ActorCritic:
    """The model of a checkpoint's `state`. Raises UsageError."""
    trained = model.build(settings, spaces)
    with UsageError.wrap("the checkpoint holds no policy of rl", KeyError, TypeError):
        weights = state["learner"]["model"]
    with UsageError.wrap("the checkpoint's policy does not fit this program", RuntimeError, TypeError, AttributeError):
        trained.load_state_dict(weights)
    return trained


class Played(NamedTuple):
    """One episode of each environment: its return [n] float64, its steps [n] int64, and whether it has ended [n]."""

    returns: Array
    lengths: Array
    ended: Array


def _play(actor: Actor, group: Envs, held: int | None) -> Played:
    """Samples actions, with new noise every `held` steps, or takes the most probable actions if `held` is None."""
    n = len(group.dones)
    state, returns, lengths, ended = actor.initial_state(n), np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for step in range(MAX_EPISODE_STEPS):
        if held is None:
            actions = actor.best(group.observations, group.dones, state)
        else:
            if step % held == 0:
                actor.refresh(state)
            actions = actor.act(group.observations, group.dones, [state]).actions
        group.step(actions)
        returns[~ended] += group.rewards[~ended]
        lengths += ~ended
        ended |= group.dones != Done.CONTINUES
        if ended.all():
            break
    return Played(returns, lengths, ended)
