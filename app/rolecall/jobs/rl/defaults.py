"""Defaults of the settings that depend on the algorithm and the kind of spaces.

The values were chosen by measurements on several environments of each kind (docs/rl.md). None depends on the id of an
environment.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.spaces import Spaces

Kind = Literal["reinforce", "discrete", "scalar", "continuous", "pixels", "sac", "sac pixels", "dqn", "dqn pixels"]


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """A value for each setting of the same name; those of all algorithms."""

    num_envs: int
    rollout_steps: int
    pipeline: bool = False
    max_iterations: int | None = 1000
    lr: float
    gamma: float | None = None  # None: by progress and the longest episode, see `discount`
    normalize: bool
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class OnPolicy(Hyperparameters):
    """Those of ALGORITHM=ppo and reinforce."""

    epochs: int
    minibatches: int
    gae_lambda: float
    clip_ratio: float
    target_kl: float
    entropy_coef: float
    exploration: Literal["gaussian", "sde"]


@dataclass(frozen=True, kw_only=True)
class OffPolicy(Hyperparameters):
    """Those of ALGORITHM=sac and dqn."""

    gamma: float = 0.99
    replay_size: int
    learning_starts: int
    updates_per_step: float
    batch_size: int
    n_step: int


FIRST_HORIZON, MIN_HORIZON, MAX_HORIZON = 100.0, 50.0, 200.0  # steps, of the discount by progress
# common values of PPO
PPO = OnPolicy(
    num_envs=16,
    rollout_steps=64,
    epochs=10,
    minibatches=8,
    lr=1e-3,
    gae_lambda=0.95,
    clip_ratio=0.2,
    target_kl=0.01,
    entropy_coef=0.0,
    normalize=True,
    exploration="gaussian",
    hidden_size=64,
)
# those of SAC: Haarnoja et al. 2018, with short rollouts, whose steps are soon learned from. After a tenth of these
# random steps HalfCheetah-v5 stopped at a third of the return.
SAC = OffPolicy(
    num_envs=4,
    rollout_steps=8,
    pipeline=True,
    max_iterations=100_000,
    lr=3e-4,
    normalize=False,
    hidden_size=256,
    replay_size=1_000_000,
    learning_starts=10_000,
    updates_per_step=1.0,
    batch_size=256,
    n_step=1,
)
# a small memory forgets the first, random episodes
DQN = replace(SAC, normalize=True, lr=6e-4, batch_size=128, replay_size=100_000, learning_starts=1000, n_step=3)
MAX_RANDOM_SHARE = 0.1  # of MAX_STEPS, of the default of LEARNING_STARTS
DEFAULTS: dict[Kind, OnPolicy | OffPolicy] = {
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
    "discrete": replace(PPO, rollout_steps=128, gamma=0.999, entropy_coef=0.01),
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
    "sac": SAC,
    "sac pixels": replace(SAC, replay_size=100_000),
    "dqn": DQN,
    # Mnih et al. 2015, with a smaller memory
    "dqn pixels": replace(
        DQN,
        lr=1e-4,
        normalize=False,
        hidden_size=512,
        learning_starts=20_000,
        updates_per_step=0.25,
        batch_size=32,
    ),
}


def kind(settings: RlSettings, spaces: Spaces) -> Kind:
    """The key of DEFAULTS."""
    match settings.algorithm:
        case "reinforce":
            return "reinforce"
        case "sac":
            return "sac pixels" if spaces.pixels else "sac"
        case "dqn":
            return "dqn pixels" if spaces.pixels else "dqn"
    if spaces.pixels:
        return "pixels"
    if not spaces.continuous:
        return "discrete"
    return "scalar" if spaces.action_shape == (1,) else "continuous"


def discount(progress: float, longest: int) -> float:
    """The discount after this share of the training, 0 to 1, of a task whose `longest` episode has so many steps.

    Its horizon, 1 / (1 - discount) steps, grows from FIRST_HORIZON to the longest episode, or MAX_HORIZON
    (François-Lavet et al. 2015), also if no episode has ended, for which `longest` is 0. With a far horizon from the
    start, a walker stands still, because to stay alive is worth more than to move.
    """
    last = min(max(longest, MIN_HORIZON), MAX_HORIZON) if longest else MAX_HORIZON
    first = min(FIRST_HORIZON, last)
    return 1 - 1 / float(first ** (1 - progress) * last**progress)


def choose(settings: RlSettings, spaces: Spaces) -> OnPolicy | OffPolicy:
    """The values of the given settings, and defaults for the others. Raises UsageError for a given setting of other
    algorithms.
    """
    row = DEFAULTS[kind(settings, spaces)]
    if settings.max_steps:  # ends the training, however many iterations it takes
        row = replace(row, max_iterations=None)
    if isinstance(row, OffPolicy) and settings.max_steps:
        most = int(MAX_RANDOM_SHARE * settings.max_steps)
        row = replace(row, learning_starts=min(row.learning_starts, most))
    names = [field.name for kind in (OnPolicy, OffPolicy) for field in fields(kind)]
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    for name, value in given.items():
        if not hasattr(row, name):
            raise UsageError(f"{name.upper()}={value}: ALGORITHM={settings.algorithm} does not use it; leave it out")
    return replace(row, **given)
