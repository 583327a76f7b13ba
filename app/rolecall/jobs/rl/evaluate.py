"""`rolecall eval rl`: the returns of fresh episodes under a saved policy, and a video of one."""

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
from rolecall.jobs.rl.stepping import Envs
from rolecall.jobs.rl.video import FilmedEnv, Video
from rolecall.jobs.support import choose_device, progress

SEED_OFFSET = 1_000_003  # episodes that were not trained on
TOGETHER = 100  # environments, at most
MOST_STEPS = 30_000  # of an episode: more than ALE's 27,000, and an end where an environment has none


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
    """The returns and lengths of `episodes` fresh episodes.

    Each has an environment of its own: of environments that go on, those with short episodes would count more. An
    episode that has not ended after MOST_STEPS counts as it is then. Raises UsageError, and BrokenEnvError.
    """
    with UsageError.wrap("the checkpoint holds no policy of rl", KeyError, TypeError):
        weights = state["learner"]["model"]
    device, seed, played = choose_device(settings.device, "DEVICE"), settings.seed + SEED_OFFSET, list[Played]()

    def play(group: Envs) -> None:
        torch.set_num_threads(settings.cpu_threads if group.spaces.pixels else 1)  # small operations wait for threads
        trained = model.build(settings, group.spaces)
        with UsageError.wrap("the checkpoint's policy does not fit this program", RuntimeError):
            trained.load_state_dict(weights)
        held = None if deterministic else choose(settings, group.spaces).rollout_steps
        played.append(_play(Actor(trained, device), group, held, advance))
        group.close()

    torch.manual_seed(seed)
    with progress("evaluating", episodes, "episodes") as advance:
        if video is not None:
            with Video(video) as film:
                play(FilmedEnv(settings, seed, film))
        first = len(played)
        for number in range(first, episodes, TOGETHER):
            play(Envs(settings, min(TOGETHER, episodes - number), seed + number, number))
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


class Played(NamedTuple):
    """One episode of each environment: its return [n] float64, its steps [n] int64, and whether it has ended [n]."""

    returns: Array
    lengths: Array
    ended: Array


def _play(actor: Actor, group: Envs, held: int | None, advance: Callable[[float], None]) -> Played:
    """Samples actions, whose noise is drawn anew after `held` steps; where that is None, takes the most probable."""
    n = len(group.dones)
    memory, returns, lengths, ended = actor.remember(n), np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for step in range(MOST_STEPS):
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
