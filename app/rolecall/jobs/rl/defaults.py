"""What the settings that are not given are: one table, by the algorithm and the kind of spaces.

The values were chosen by measurement over several environments of each kind (docs/rl.md); none is an environment's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.spaces import Spaces

Kind = Literal["reinforce", "discrete", "scalar", "continuous", "pixels"]


@dataclass(frozen=True)
class Choices:
    """The settings of the same names, with a value for each."""

    num_envs: int
    rollout_steps: int
    epochs: int
    minibatches: int
    lr: float
    lr_schedule: Literal["constant", "linear", "adaptive"]
    gamma: float
    gae_lambda: float
    clip_ratio: float
    target_kl: float
    entropy_coef: float
    max_grad_norm: float
    normalize: bool
    exploration: Literal["gaussian", "sde"]
    hidden_size: int


DEFAULTS: dict[Kind, Choices] = {
    # the tutorial's
    "reinforce": Choices(
        num_envs=64, rollout_steps=64, epochs=1, minibatches=4, lr=1e-2, lr_schedule="constant",
        gamma=0.99, gae_lambda=1.0,
        clip_ratio=0.2, target_kl=0.0, entropy_coef=0.0, max_grad_norm=0.5, normalize=False, exploration="gaussian",
        hidden_size=128,
    ),
    "discrete": Choices(
        num_envs=16, rollout_steps=32, epochs=10, minibatches=4, lr=1e-3, lr_schedule="adaptive", gamma=0.999,
        gae_lambda=0.95, clip_ratio=0.2, target_kl=0.01, entropy_coef=0.0, max_grad_norm=0.5, normalize=True,
        exploration="gaussian", hidden_size=64,
    ),
    # one number: wide noise that is held for long reaches what no single action does
    "scalar": Choices(
        num_envs=8, rollout_steps=128, epochs=10, minibatches=8, lr=1e-3, lr_schedule="adaptive", gamma=0.99,
        gae_lambda=0.95, clip_ratio=0.2, target_kl=0.03, entropy_coef=0.0, max_grad_norm=0.5, normalize=True,
        exploration="sde", hidden_size=64,
    ),
    # several: in that much noise, what each of them does would drown
    "continuous": Choices(
        num_envs=16, rollout_steps=64, epochs=10, minibatches=8, lr=1e-3, lr_schedule="adaptive", gamma=0.995,
        gae_lambda=0.95, clip_ratio=0.2, target_kl=0.01, entropy_coef=0.0, max_grad_norm=0.5, normalize=True,
        exploration="gaussian", hidden_size=64,
    ),
    # the usual ones: two observers' samples make minibatches of 256
    "pixels": Choices(
        num_envs=8, rollout_steps=128, epochs=4, minibatches=8, lr=2.5e-4, lr_schedule="constant",
        gamma=0.99, gae_lambda=0.95,
        clip_ratio=0.1, target_kl=0.0, entropy_coef=0.01, max_grad_norm=0.5, normalize=False, exploration="gaussian",
        hidden_size=512,
    ),
}  # fmt: skip


def kind(settings: RlSettings, spaces: Spaces) -> Kind:
    """The table's row."""
    if settings.algorithm == "reinforce":
        return "reinforce"
    if spaces.pixels:
        return "pixels"
    if not spaces.continuous:
        return "discrete"
    return "scalar" if spaces.action_shape == (1,) else "continuous"


def choose(settings: RlSettings, spaces: Spaces) -> Choices:
    """The settings as they are given, and the table's where they are not. Raises UsageError where they do not go
    together.
    """
    given = {field.name: getattr(settings, field.name) for field in fields(Choices)}
    choices = replace(
        DEFAULTS[kind(settings, spaces)], **{name: value for name, value in given.items() if value is not None}
    )
    if choices.lr_schedule == "adaptive" and not choices.target_kl:
        raise UsageError(
            "LR_SCHEDULE=adaptive with TARGET_KL=0: the rate follows TARGET_KL; set TARGET_KL, such as 0.01, or "
            "LR_SCHEDULE=constant"
        )
    return choices
