"""RLlib's PPO, with two processes that step environments, its default.

Settings: those of its own examples for CartPole-v1 (which serve Acrobot-v1 too) and Pendulum-v1
(rllib/examples/algorithms/ppo in ray-project/ray).
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import ray
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

from bench.peers import report

RUNNERS = 2
LIFETIME = "num_env_steps_sampled_lifetime"


def make(options: report.Options) -> Any:
    import gymnasium

    return gymnasium.make(options.environment)


def configure(options: report.Options) -> Any:
    register_env("bench", lambda _: make(options))
    config = PPOConfig().environment("bench").debugging(seed=options.seed, log_level="ERROR")
    if isinstance(make(options).action_space, Discrete):
        config = config.env_runners(num_env_runners=RUNNERS)
        config = config.training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        model = DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True)
    else:
        config = config.env_runners(
            num_env_runners=RUNNERS, num_envs_per_env_runner=20,
            env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
        )  # fmt: skip
        config = config.training(
            train_batch_size_per_learner=1024, minibatch_size=128, lr=0.0002, gamma=0.95, lambda_=0.5
        )
        model = DefaultModelConfig(fcnet_activation="relu")
    return config.rl_module(model_config=model).evaluation(
        evaluation_interval=10**9,  # never by itself; 0 would leave it no environments
        evaluation_num_env_runners=0,
        evaluation_duration=max(1, options.episodes),
        evaluation_duration_unit="episodes",
        evaluation_config=PPOConfig.overrides(
            explore=options.sampled, num_envs_per_env_runner=max(1, options.episodes)
        ),
    )


def main() -> int:
    options = report.Options.parse(__doc__)
    warnings.filterwarnings("ignore")
    # as many as it asks for, whatever there is: two cores for three processes
    ray.init(num_cpus=RUNNERS + 2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm = configure(options).build_algo()

    def evaluate(episodes: int) -> list[float]:
        result = algorithm.evaluate()["env_runners"]
        return [float(result["episode_return_mean"])] * episodes  # it gives their mean only

    lines = report.Report(options, evaluate)
    lines.begin()
    steps = 0
    while steps < options.steps:
        steps = int(algorithm.train()["env_runners"][LIFETIME])
        if lines.look(steps):
            break
    lines.end(steps)
    algorithm.stop()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
