"""`rolecall eval rl`: the returns of new episodes under a saved policy, and a video of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.actor import Actor
from rolecall.jobs.rl.defaults import choose
from rolecall.jobs.rl.messages import Array, Done
from rolecall.jobs.rl.spaces import Spaces
from rolecall.jobs.rl.stepping import Envs
from rolecall.jobs.rl.video import FilmedEnv, Video
from rolecall.jobs.support import choose_device, progress

SEED_OFFSET = 1_000_003  # gives episodes that were not trained on
MAX_ENVIRONMENTS = 100  # stepped together
MAX_EPISODE_STEPS = 30_000  # more than ALE's 27,000; ends episodes that would not end


def evaluate(
    settings: RlSettings,
    state: dict[str, Any],
    *,
    episodes: Annotated[int, Field(ge=1, le=1_000_000, description="how many")] = 100,
    deterministic: Annotated[
        bool, Field(description="take the most probable action; otherwise sample it, as in training")
    ] = True,
    video: Annotated[Path | None, Field(description="show the first one in FILE.mp4 or FILE.gif")] = None,
) -> dict[str, float]:
    """The returns and lengths of `episodes` new episodes.

    Each has a separate environment: if environments were used again, short episodes would count more. An episode that
    has not ended after MAX_EPISODE_STEPS counts as it is then. Raises UsageError, and BrokenEnvError.
    """
    device, seed, played = choose_device(settings.device, "DEVICE"), settings.seed + SEED_OFFSET, list[Played]()

    def play(group: Envs) -> None:
        torch.set_num_threads(settings.cpu_threads if group.spaces.pixels else 1)  # threads slow down small operations
        trained = restore(settings, group.spaces, state)
        held = None if deterministic else choose(settings, group.spaces).rollout_steps
        played.append(_play(Actor(trained, device), group, held, advance))
        group.close()

    torch.manual_seed(seed)
    with progress("evaluating", episodes, "episodes") as advance:
        if video is not None:
            with Video(video) as film:
                play(FilmedEnv(settings, seed, film))
        first = len(played)
        for number in range(first, episodes, MAX_ENVIRONMENTS):
            play(Envs(settings, min(MAX_ENVIRONMENTS, episodes - number), seed + number, number))
    returns, lengths, ended = (np.concatenate(column) for column in zip(*played, strict=True))
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
    with UsageError.wrap("the checkpoint's policy does not fit this program", RuntimeError):
        trained.load_state_dict(weights)
    return trained


class Played(NamedTuple):
    """One episode of each environment: its return [n] float64, its steps [n] int64, and whether it has ended [n]."""

    returns: Array
    lengths: Array
    ended: Array


def _play(actor: Actor, group: Envs, held: int | None, advance: Callable[[float], None]) -> Played:
    """Samples actions, with new noise every `held` steps, or takes the most probable actions if `held` is None."""
    n = len(group.dones)
    memory, returns, lengths, ended = actor.remember(n), np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for step in range(MAX_EPISODE_STEPS):
        if held is None:
            actions = actor.best(group.observations, group.dones, memory)
        else:
            if step % held == 0:
                actor.refresh(memory)
            actions = actor.act(group.observations, group.dones, [memory]).actions
        group.step(actions)
        returns[~ended] += group.rewards[~ended]
        lengths += ~ended
        before = int(ended.sum())
        ended |= group.dones != Done.CONTINUES
        advance(int(ended.sum()) - before)
        if ended.all():
            break
    return Played(returns, lengths, ended)
