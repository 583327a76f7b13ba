"""Sample Factory's APPO. Its learner is a process of its own, which saves its policy four times a second; each is
evaluated after the training, oldest first.

Settings: those that its examples give: for CartPole-v1 (sf_examples/train_gym_env.py), which serve Acrobot-v1 too, and
for Box actions (sf_examples/mujoco), on as many workers as cores. The training ends early once the mean return of its
last 100 episodes reaches the threshold.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.action_distributions import argmax_actions
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.algo.utils.rl_utils import prepare_and_normalize_obs
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import create_actor_critic
from sample_factory.model.model_utils import get_rnn_size
from sample_factory.train import make_runner
from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

from bench.peers import report

BEGUN = "BENCH_BEGUN"  # the file that says when the first step was made
SAVE_EVERY = 0.25  # seconds
CORES = len(os.sched_getaffinity(0))
CARTPOLE = {
    "use_rnn": False, "num_envs_per_worker": 20, "policy_workers_per_policy": 2, "recurrence": 1, "with_vtrace": False,
    "batch_size": 512, "reward_scale": 0.1,
}  # fmt: skip


class Stamped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes when the first of all environments makes its first step."""

    stamped = False  # in this process

    def step(self, action: Any) -> Any:
        if not Stamped.stamped:
            Stamped.stamped = True
            with contextlib.suppress(FileExistsError), Path(os.environ[BEGUN]).open("x") as file:
                file.write(str(time.monotonic()))
        return super().step(action)


def make(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    return Stamped(gymnasium.make(name, render_mode=render_mode))


class Until(AlgoObserver):  # type: ignore[misc]
    """Ends the training where its own episodes reach the threshold, or its seconds are over."""

    def __init__(self, options: report.Options) -> None:
        self._options, self._begun = options, math.inf

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        self._begun = min(self._begun, float(Path(os.environ[BEGUN]).read_text()))
        returns, threshold = runner.policy_avg_stats.get("reward", [()])[0], self._options.threshold
        solved = threshold is not None and len(returns) >= report.EPISODES and np.mean(returns) >= threshold
        if solved or time.monotonic() - self._begun >= self._options.seconds:
            runner.cfg.train_for_env_steps = 0


def configure(options: report.Options, folder: str) -> Any:
    arguments = [
        f"--env={options.environment}", "--experiment=bench", f"--train_dir={folder}", f"--seed={options.seed}",
        "--device=cpu", f"--num_workers={CORES}", f"--train_for_env_steps={options.steps}",
        "--keep_checkpoints=100000", "--summaries_use_frameskip=False",
    ]  # fmt: skip
    parser, _ = parse_sf_args(arguments)
    if isinstance(gymnasium.make(options.environment).action_space, Box):
        mujoco_override_defaults(options.environment, parser)
    else:
        parser.set_defaults(**CARTPOLE)
    cfg = parse_full_cfg(parser, arguments)
    cfg.save_every_sec = SAVE_EVERY if options.threshold is not None else 5.0
    return cfg


def policies(
    cfg: Any, runner: Any, options: report.Options, files: list[str], begun: float
) -> Iterator[tuple[int, float, list[float]]]:
    """Of each file that is due: the environment steps behind it, its seconds since `begun`, and its policy's scores."""
    last = begun
    spaces = runner.env_info
    model = create_actor_critic(cfg, spaces.obs_space, spaces.action_space)
    model.eval()
    model.model_to_device(torch.device("cpu"))

    def act(observations: Any) -> Any:
        with torch.no_grad():
            rows = prepare_and_normalize_obs(model, {"obs": torch.as_tensor(observations, dtype=torch.float32)})
            outputs = model(rows, torch.zeros(len(observations), get_rnn_size(cfg)))
            best = outputs["actions"] if options.sampled else argmax_actions(model.action_distribution())
        if isinstance(spaces.action_space, Box):
            return np.clip(best.numpy(), spaces.action_space.low, spaces.action_space.high)
        return best.numpy().reshape(len(observations))

    for file in files:
        written = Path(file).stat().st_mtime
        if file != files[-1] and not report.due(written - begun, last - begun, options.every):
            continue
        last = written
        saved = torch.load(file, map_location="cpu", weights_only=False)
        model.load_state_dict(saved["model"])
        scores: list[float] = []
        if options.episodes:
            scores = report.play(lambda: gymnasium.make(options.environment), act, options.episodes, options.seed)
        yield int(saved["env_steps"]), written - begun, scores


def main() -> int:
    options = report.Options.parse(__doc__)
    with tempfile.TemporaryDirectory(prefix="bench-appo-", ignore_cleanup_errors=True) as folder:
        os.environ[BEGUN] = str(Path(folder) / "begun")
        register_env(options.environment, make)
        cfg, runner = make_runner(configure(options, folder))
        runner.register_observer(Until(options))
        if runner.init() != ExperimentStatus.SUCCESS or runner.run() != ExperimentStatus.SUCCESS:
            return 1
        ended = time.monotonic()
        begun = float(Path(os.environ[BEGUN]).read_text())
        report.say("begin", at=begun)
        files = Learner.get_checkpoints(Learner.checkpoint_dir(cfg, 0), "checkpoint_*.pth")
        used = files if options.threshold is not None else files[-1:]
        steps, seconds, scores = 0, 0.0, list[float]()
        for steps, seconds, scores in policies(cfg, runner, options, used, time.time() - time.monotonic() + begun):
            report.say("snapshot", steps=steps, seconds=seconds, scores=scores)
            if options.threshold is not None and np.mean(scores) >= options.threshold:
                break
        report.say("end", steps=steps, seconds=seconds, paused=time.monotonic() - ended, scores=scores)
    return 0


if __name__ == "__main__":
    sys.exit(main())
