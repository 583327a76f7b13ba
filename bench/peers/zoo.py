"""Stable-Baselines3's hyper-parameters: those that RL Baselines3 Zoo publishes, for gymnasium's newest versions.

Source: hyperparams/ppo.yml and hyperparams/ppo_lstm.yml (memory) of DLR-RM/rl-baselines3-zoo. What is published for
LunarLander-v2, HalfCheetah-v4, Walker2d-v4 and CartPoleNoVel-v1 is used for -v3, -v5 and MaskedCartPole-v0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Schedule = tuple[str, float]  # ("lin", v): falls from v to 0 with the steps

MASKED = "bench.peers.environments:MaskedCartPole-v0"
PONG = "ale_py:PongNoFrameskip-v4"
BOXING = "ale_py:BoxingNoFrameskip-v4"


@dataclass(frozen=True)
class Published:
    """One environment's entry. `ppo` are PPO's own arguments, `network` its policy's."""

    ppo: dict[str, Any]
    n_envs: int = 1
    normalize: bool = False
    atari: bool = False
    network: dict[str, Any] = field(default_factory=dict)
    relu: bool = False


def linear(value: float) -> Schedule:
    return "lin", value


CARTPOLE = Published(
    {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
     "learning_rate": linear(0.001), "clip_range": linear(0.2)},
    n_envs=8,
)  # fmt: skip
LUNAR = Published(
    {"n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01}, n_envs=16
)
ATARI = Published(
    {"n_steps": 128, "n_epochs": 4, "batch_size": 256, "learning_rate": linear(2.5e-4), "clip_range": linear(0.1),
     "vf_coef": 0.5, "ent_coef": 0.01},
    n_envs=8, atari=True,
)  # fmt: skip

ZOO = {
    "CartPole-v1": CARTPOLE,
    MASKED: CARTPOLE,
    "Acrobot-v1": Published(
        {"n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0}, n_envs=16, normalize=True
    ),
    "MountainCarContinuous-v0": Published(
        {"batch_size": 256, "n_steps": 8, "gamma": 0.9999, "learning_rate": 7.77e-5, "ent_coef": 0.00429,
         "clip_range": 0.1, "n_epochs": 10, "gae_lambda": 0.9, "max_grad_norm": 5, "vf_coef": 0.19, "use_sde": True},
        normalize=True, network={"log_std_init": -3.29, "ortho_init": False},
    ),
    "Pendulum-v1": Published(
        {"n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0, "learning_rate": 1e-3,
         "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4},
        n_envs=4,
    ),
    "LunarLander-v3": LUNAR,
    "LunarLanderContinuous-v3": LUNAR,
    "HalfCheetah-v5": Published(
        {"batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-5, "ent_coef": 0.000401762,
         "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096},
        normalize=True, relu=True,
        network={"log_std_init": -2, "ortho_init": False, "net_arch": {"pi": [256, 256], "vf": [256, 256]}},
    ),
    "Walker2d-v5": Published(
        {"batch_size": 32, "n_steps": 512, "gamma": 0.99, "learning_rate": 5.05041e-5, "ent_coef": 0.000585045,
         "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1, "vf_coef": 0.871923},
        normalize=True,
    ),
    PONG: ATARI,
    BOXING: ATARI,
}  # fmt: skip
MEMORY = {MASKED: CARTPOLE}  # RecurrentPPO's


def arguments(published: Published) -> dict[str, Any]:
    """PPO's arguments, with each schedule as a function of the part of the training that is left."""
    return {name: _falls(value[1]) if isinstance(value, tuple) else value for name, value in published.ppo.items()}


def _falls(start: float) -> Any:
    return lambda left: left * start
