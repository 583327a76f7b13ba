"""Stable-Baselines3's hyper-parameters: those that RL Baselines3 Zoo publishes, for gymnasium's newest versions.

Source: hyperparams/ppo.yml, ppo_lstm.yml (memory), sac.yml and dqn.yml of DLR-RM/rl-baselines3-zoo. Entries for older
versions (LunarLander-v2, Reacher-v2, -v4 of the other MuJoCo environments) are used for the newest ones, that of
CartPoleNoVel-v1 for MaskedCartPole-v0, and that of MiniGrid-Empty-Random-5x5-v0 for 6x6. Taxi, CliffWalking,
FrozenLake and Blackjack have no entry: they take Stable-Baselines3's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Algorithm = Literal["ppo", "sac", "dqn"]
Schedule = tuple[str, float]  # ("lin", v): falls from v to 0 with the steps

MASKED = "bench.peers.environments:MaskedCartPole-v0"
CLIFF = "bench.peers.environments:LimitedCliffWalking-v1"
EMPTY_ROOM = "bench.peers.environments:FlatEmptyRandom6x6-v0"
DOOR_KEY = "bench.peers.environments:FlatDoorKey5x5-v0"
KEY_CORRIDOR = "bench.peers.environments:FlatKeyCorridorS3R1-v0"
BLACKJACK = "bench.peers.environments:FlatBlackjack-v1"
BOXING = "ale_py:BoxingNoFrameskip-v4"
BREAKOUT = "ale_py:BreakoutNoFrameskip-v4"


@dataclass(frozen=True)
class Published:
    """One environment's entry. `algorithm` are the algorithm's own arguments, `network` its policy's."""

    algorithm: dict[str, Any]
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
GRID = Published(
    {"n_steps": 128, "batch_size": 64, "gae_lambda": 0.95, "gamma": 0.99, "n_epochs": 10, "ent_coef": 0.0,
     "learning_rate": 2.5e-4, "clip_range": 0.2},
    n_envs=8, normalize=True,
)  # fmt: skip
DEFAULTS = Published({})

PPO = {
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
    BOXING: ATARI,
    BREAKOUT: ATARI,
    "Taxi-v4": DEFAULTS,
    CLIFF: DEFAULTS,
    "FrozenLake-v1": DEFAULTS,
    BLACKJACK: DEFAULTS,
    EMPTY_ROOM: GRID,
    DOOR_KEY: GRID,
    KEY_CORRIDOR: GRID,
    "MountainCar-v0": Published(
        {"n_steps": 16, "gae_lambda": 0.98, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0}, n_envs=16, normalize=True
    ),
    "BipedalWalker-v3": Published(
        {"n_steps": 2048, "batch_size": 64, "gae_lambda": 0.95, "gamma": 0.999, "n_epochs": 10, "ent_coef": 0.0,
         "learning_rate": 3e-4, "clip_range": 0.18},
        n_envs=32, normalize=True,
    ),
    "Ant-v5": Published({}, normalize=True),
    "Hopper-v5": Published(
        {"batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-5, "ent_coef": 0.00229519,
         "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671},
        normalize=True, relu=True,
        network={"log_std_init": -2, "ortho_init": False, "net_arch": {"pi": [256, 256], "vf": [256, 256]}},
    ),
    "InvertedDoublePendulum-v5": Published(
        {"batch_size": 512, "n_steps": 128, "gamma": 0.98, "learning_rate": 1.55454e-4, "ent_coef": 1.05057e-6,
         "clip_range": 0.4, "n_epochs": 10, "gae_lambda": 0.8, "max_grad_norm": 0.5, "vf_coef": 0.695929},
        normalize=True,
    ),
    "InvertedPendulum-v5": Published(
        {"batch_size": 64, "n_steps": 32, "gamma": 0.999, "learning_rate": 2.22425e-4, "ent_coef": 1.37976e-7,
         "clip_range": 0.4, "n_epochs": 5, "gae_lambda": 0.9, "max_grad_norm": 0.3, "vf_coef": 0.19816},
        normalize=True,
    ),
    "Swimmer-v5": Published(
        {"gamma": 0.9999, "n_steps": 1024, "batch_size": 256, "learning_rate": 6e-4, "gae_lambda": 0.98},
        n_envs=4, normalize=True,
    ),
    "Reacher-v5": Published(
        {"batch_size": 32, "n_steps": 512, "gamma": 0.9, "learning_rate": 1.04019e-4, "ent_coef": 7.52585e-8,
         "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 1.0, "max_grad_norm": 0.9, "vf_coef": 0.950368},
        normalize=True,
    ),
}  # fmt: skip
RECURRENT_PPO = {MASKED: CARTPOLE}  # with a memory
SAC = {"HalfCheetah-v5": Published({"learning_starts": 10_000})}
DQN = {
    "CartPole-v1": Published(
        {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
         "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
         "exploration_final_eps": 0.04},
        network={"net_arch": [256, 256]},
    ),
    "MountainCar-v0": Published(
        {"learning_rate": 4e-3, "batch_size": 128, "buffer_size": 10_000, "learning_starts": 1000, "gamma": 0.98,
         "target_update_interval": 600, "train_freq": 16, "gradient_steps": 8, "exploration_fraction": 0.2,
         "exploration_final_eps": 0.07},
        network={"net_arch": [256, 256]},
    ),
}  # fmt: skip


def tables(memory: bool = False) -> dict[Algorithm, dict[str, Published]]:
    """The entries of each algorithm, by environment."""
    return {"ppo": RECURRENT_PPO if memory else PPO, "sac": SAC, "dqn": DQN}


def arguments(published: Published) -> dict[str, Any]:
    """The algorithm's arguments, with each schedule as a function of the part of the training that is left."""
    return {
        name: _falls(value[1]) if isinstance(value, tuple) else value for name, value in published.algorithm.items()
    }


def _falls(start: float) -> Any:
    return lambda left: left * start
