"""Defaults of the settings that depend on the algorithm and the kind of spaces.

The values were chosen by measurements on several environments of each kind (docs/rl.md). None depends on the id of an
environment.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.spaces import Spaces

Kind = Literal["reinforce", "discrete", "scalar", "continuous", "pixels"]


@dataclass(frozen=True)
class Choices:
    """A value for each setting of the same name."""

    num_envs: int
    rollout_steps: int
    epochs: int
    minibatches: int
    lr: float
    gamma: float | None  # None: by progress and the longest episode, see `discount`
    gae_lambda: float
    clip_ratio: float
    target_kl: float
    entropy_coef: float
    normalize: bool
    exploration: Literal["gaussian", "sde"]
    hidden_size: int


FIRST_HORIZON, MIN_HORIZON, MAX_HORIZON = 100.0, 50.0, 1000.0  # steps, of the discount by progress
# common values of PPO
PPO = Choices(
    num_envs=16,
    rollout_steps=64,
    epochs=10,
    minibatches=8,
    lr=1e-3,
    gamma=None,
    gae_lambda=0.95,
    clip_ratio=0.2,
    target_kl=0.01,
    entropy_coef=0.0,
    normalize=True,
    exploration="gaussian",
    hidden_size=64,
)
DEFAULTS: dict[Kind, Choices] = {
    # the tutorial's values
    "reinforce": replace(
        PPO,
        num_envs=64,
        epochs=1,
        minibatches=4,
        lr=1e-2,
        gamma=0.99,
        gae_lambda=1.0,
        target_kl=0.0,
        normalize=False,
        hidden_size=128,
    ),
    # without the entropy bonus, a policy that is seldom rewarded becomes certain before it has found what is rewarded
    "discrete": replace(PPO, rollout_steps=32, minibatches=4, gamma=0.999, entropy_coef=0.01),
    # one number: wide noise that is held reaches states that no single action reaches
    "scalar": replace(PPO, num_envs=8, rollout_steps=128, target_kl=0.03, exploration="sde"),
    # several numbers: wide noise hides the effect of each
    "continuous": PPO,
    # the samples of two observers make minibatches of 256
    "pixels": replace(
        PPO,
        num_envs=8,
        rollout_steps=128,
        epochs=4,
        lr=2.5e-4,
        gamma=0.99,
        clip_ratio=0.1,
        target_kl=0.0,
        entropy_coef=0.01,
        normalize=False,
        hidden_size=512,
    ),
}


def kind(settings: RlSettings, spaces: Spaces) -> Kind:
    """The key of DEFAULTS."""
    if settings.algorithm == "reinforce":
        return "reinforce"
    if spaces.pixels:
        return "pixels"
    if not spaces.continuous:
        return "discrete"
    return "scalar" if spaces.action_shape == (1,) else "continuous"


def discount(progress: float, longest: int) -> float:
    """The discount after this share of the training, 0 to 1, of a task whose `longest` episode has so many steps.

    Its horizon, 1 / (1 - discount) steps, grows from FIRST_HORIZON to the longest episode (François-Lavet et al. 2015):
    with a far horizon from the start, a walker stands still, because to stay alive is worth more than to move.
    """
    last = min(max(longest, MIN_HORIZON), MAX_HORIZON)
    first = min(FIRST_HORIZON, last)
    return 1 - 1 / float(first ** (1 - progress) * last**progress)


def choose(settings: RlSettings, spaces: Spaces) -> Choices:
    """The values of the given settings, and defaults for the others."""
    given = {field.name: getattr(settings, field.name) for field in fields(Choices)}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(DEFAULTS[kind(settings, spaces)], **given)
