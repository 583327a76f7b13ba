"""Stable-Baselines3 with RL Baselines3 Zoo's hyper-parameters; with --memory PPO is RecurrentPPO of sb3-contrib."""

from __future__ import annotations

import sys
from typing import Any

from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, sync_envs_normalization
from torch import nn

from bench.peers import environments, report, zoo

ALGORITHMS = {"ppo": PPO, "sac": SAC, "dqn": DQN}


class Watch(BaseCallback):
    """Reports before each rollout, when the policy is new, and ends the training with the rollout's first step."""

    def __init__(self, lines: report.Report) -> None:
        super().__init__()
        self._lines, self._begun, self._ended = lines, False, False

    def _on_rollout_start(self) -> None:
        if not self._begun:
            self._begun = True
            self._lines.begin()
        else:
            self._ended = self._lines.look(self.num_timesteps)

    def _on_step(self) -> bool:
        return not self._ended


def make(options: report.Options, published: zoo.Published, n: int, seed: int, training: bool) -> Any:
    """`n` environments in one process, as RL Zoo makes them."""
    env: Any = make_vec_env(options.environment, n, seed, wrapper_class=AtariWrapper if published.atari else None)
    if published.normalize:
        gamma = published.algorithm.get("gamma", 0.99)
        env = VecNormalize(env, training=training, norm_reward=training, gamma=gamma)
    return VecFrameStack(env, environments.FRAMES) if published.atari else env


def main() -> int:
    options = report.Options.parse(__doc__)
    published = zoo.tables(options.memory)[options.algorithm][options.environment]
    algorithm: Any = ALGORITHMS[options.algorithm]
    policy = "CnnPolicy" if published.atari else "MlpPolicy"
    if options.memory:
        from sb3_contrib import RecurrentPPO  # imports slowly, and only here

        algorithm, policy = RecurrentPPO, "MlpLstmPolicy"
    env = make(options, published, published.n_envs, options.seed, training=True)
    network = {**published.network, **({"activation_fn": nn.ReLU} if published.relu else {})}
    model = algorithm(policy, env, seed=options.seed, policy_kwargs=network, device="cpu", **zoo.arguments(published))

    def evaluate(episodes: int) -> list[float]:
        fresh = make(options, published, episodes, options.seed + report.SEED_OFFSET, training=False)
        if isinstance(env, VecNormalize):
            sync_envs_normalization(env, fresh)
        returns, _ = evaluate_policy(
            model, fresh, episodes, deterministic=not options.sampled, return_episode_rewards=True
        )
        fresh.close()
        return [float(each) for each in returns]

    lines = report.Report(options, evaluate)
    model.learn(options.steps, callback=Watch(lines))
    lines.end(model.num_timesteps, model._n_updates if isinstance(model, OffPolicyAlgorithm) else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
