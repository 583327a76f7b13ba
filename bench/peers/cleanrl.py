"""A loop of PPO with CleanRL's settings over gymnasium's vector environments, 128 of them and 64 steps each.

Settings: those of CleanRL's ppo.py (discrete actions), ppo_continuous_action.py (Box) and ppo_atari_envpool.py (pixels,
`envpool:Id`, with its 8 environments and 128 steps). A minibatch has as many samples as CleanRL's: with as many
minibatches, a rollout of 128 environments makes too few optimizer steps to learn. gymnasium resets an environment in
the step after an episode's end; that step is no experience and takes no part in the loss.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from bench.peers import environments, report

ENVPOOL = "envpool:"
BOUND = 10.0  # of normalised observations and rewards


@dataclass(frozen=True)
class Settings:
    lr: float
    minibatch: int  # samples
    epochs: int
    entropy: float
    clip: float = 0.2
    num_envs: int = 128
    steps: int = 64
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value: float = 0.5
    max_norm: float = 0.5


DISCRETE = Settings(lr=2.5e-4, minibatch=128, epochs=4, entropy=0.01)
CONTINUOUS = Settings(lr=3e-4, minibatch=64, epochs=10, entropy=0.0)
PIXELS = Settings(lr=2.5e-4, minibatch=256, epochs=4, entropy=0.01, clip=0.1, num_envs=8, steps=128)


class Agent(nn.Module):
    """Actor and critic: two networks for a vector, one trunk for pictures [4, 84, 84]."""

    def __init__(self, observations: Any, actions: Any) -> None:
        super().__init__()
        self.discrete = isinstance(actions, Discrete)
        outputs = int(actions.n) if self.discrete else int(np.prod(actions.shape))
        self.trunk: nn.Module = nn.Identity()
        if len(observations.shape) == 3:
            self.trunk = nn.Sequential(
                _layer(nn.Conv2d(environments.FRAMES, 32, 8, 4)), nn.ReLU(), _layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
                _layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(), _layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
            )  # fmt: skip
            self.actor, self.critic = _layer(nn.Linear(512, outputs), 0.01), _layer(nn.Linear(512, 1), 1.0)
        else:
            inputs = int(np.prod(observations.shape))
            self.actor, self.critic = _network(inputs, outputs, 0.01), _network(inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs), requires_grad=not self.discrete)

    def forward(self, observations: Tensor) -> tuple[Any, Tensor]:
        """The distribution of the actions, and the values [n]."""
        rows = self.trunk(observations / 255.0 if observations.dim() == 4 else observations)
        outputs, values = self.actor(rows), self.critic(rows).squeeze(-1)
        if self.discrete:
            return Categorical(logits=outputs), values
        return Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1), values

    @torch.no_grad()
    def act(self, observations: Tensor, sampled: bool) -> Any:
        distribution, _ = self(observations)
        if sampled:
            return distribution.sample().numpy()
        return (distribution.probs.argmax(-1) if self.discrete else distribution.mean).numpy()


class Loop:
    """Collects rollouts and learns from them."""

    def __init__(self, options: report.Options) -> None:
        self.options = options
        pixels = options.environment.startswith(ENVPOOL)
        if pixels:
            import envpool  # where it is used only

            name = options.environment.removeprefix(ENVPOOL)
            self.settings = PIXELS
            self.env: Any = envpool.make_gymnasium(
                name, num_envs=PIXELS.num_envs, seed=options.seed, episodic_life=True, reward_clip=True
            )
            observations, actions = self.env.observation_space, self.env.action_space
        else:
            single = gymnasium.make(options.environment)
            observations, actions = single.observation_space, single.action_space
            self.settings = DISCRETE if isinstance(actions, Discrete) else CONTINUOUS
            self.env = gymnasium.make_vec(options.environment, self.settings.num_envs)
        self.actions = actions
        self.normalizer: Any = None
        if isinstance(actions, Box):
            wrappers = gymnasium.wrappers.vector
            self.env = self.normalizer = wrappers.NormalizeObservation(self.env)
            self.env = wrappers.NormalizeReward(self.env, self.settings.gamma)
        self.agent = Agent(observations, actions)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=self.settings.lr, eps=1e-5)
        self.iterations = max(1, options.steps // (self.settings.num_envs * self.settings.steps))
        self.done = 0

    def run(self, lines: report.Report) -> None:
        observations = self._tensor(self.env.reset(seed=self.options.seed)[0])
        ended = torch.zeros(self.settings.num_envs)
        lines.begin()
        for iteration in range(self.iterations):
            self.optimizer.param_groups[0]["lr"] = self.settings.lr * (1 - iteration / self.iterations)
            columns, observations, ended = self._rollout(observations, ended)
            self._learn(columns)
            if lines.look(self.done):
                break
        lines.end(self.done)

    def evaluate(self, episodes: int) -> list[float]:
        actions, normalizer = self.actions, self.normalizer

        def act(observations: Any) -> Any:
            if normalizer is not None:
                statistics = normalizer.obs_rms
                observations = (observations - statistics.mean) / np.sqrt(statistics.var + normalizer.epsilon)
            chosen = self.agent.act(self._tensor(observations), self.options.sampled)
            return np.clip(chosen, actions.low, actions.high) if isinstance(actions, Box) else chosen

        return report.play(lambda: gymnasium.make(self.options.environment), act, episodes, self.options.seed)

    def _tensor(self, observations: Any) -> Tensor:
        rows = torch.as_tensor(observations, dtype=torch.float32)
        return rows.clamp(-BOUND, BOUND) if self.normalizer is not None else rows

    def _rollout(self, observations: Tensor, ended: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """The experience as columns [m]: observations, actions, log probabilities, advantages, returns, values."""
        settings, seen, bounded = self.settings, [], isinstance(self.actions, Box)
        for _ in range(settings.steps):
            with torch.no_grad():
                distribution, values = self.agent(observations)
                actions = distribution.sample()
                chances = distribution.log_prob(actions)
            chosen = np.clip(actions.numpy(), self.actions.low, self.actions.high) if bounded else actions.numpy()
            after, rewards, terminated, truncated, _ = self.env.step(chosen)
            earned = torch.as_tensor(rewards, dtype=torch.float32)
            earned = earned.clamp(-BOUND, BOUND) if bounded else earned
            seen.append((observations, actions, chances, values, earned, ended))
            observations = self._tensor(after)
            ended = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        rows, actions, chances, values, earned, ends = (torch.stack(column) for column in zip(*seen, strict=True))
        with torch.no_grad():
            following = torch.cat([values[1:], self.agent(observations)[1][None]])
        goes_on = 1 - torch.cat([ends[1:], ended[None]])
        advantages, advantage = torch.zeros_like(values), torch.zeros(settings.num_envs)
        for step in reversed(range(settings.steps)):
            surprise = earned[step] + settings.gamma * following[step] * goes_on[step] - values[step]
            advantage = surprise + settings.gamma * settings.gae_lambda * goes_on[step] * advantage
            advantages[step] = advantage
        used = ends == 0  # the others only reset
        self.done += int(used.sum())
        return [column[used] for column in (rows, actions, chances, advantages, advantages + values, values)], \
            observations, ended  # fmt: skip

    def _learn(self, columns: list[Tensor]) -> None:
        for _ in range(self.settings.epochs):
            for part in torch.randperm(len(columns[0])).split(self.settings.minibatch):
                self.optimizer.zero_grad()
                self._loss(*(column[part] for column in columns)).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), self.settings.max_norm)
                self.optimizer.step()

    def _loss(self, rows: Tensor, actions: Tensor, chances: Tensor, advantages: Tensor, returns: Tensor,
              before: Tensor) -> Tensor:  # fmt: skip
        settings = self.settings
        distribution, values = self.agent(rows)
        ratio = (distribution.log_prob(actions) - chances).exp()
        normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = -torch.min(normal * ratio, normal * ratio.clamp(1 - settings.clip, 1 + settings.clip)).mean()
        clipped = before + (values - before).clamp(-settings.clip, settings.clip)
        value = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy - settings.entropy * distribution.entropy().mean() + settings.value * value


def _layer(layer: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _network(inputs: int, outputs: int, gain: float) -> nn.Module:
    return nn.Sequential(
        _layer(nn.Linear(inputs, 64)),
        nn.Tanh(),
        _layer(nn.Linear(64, 64)),
        nn.Tanh(),
        _layer(nn.Linear(64, outputs), gain),
    )


def main() -> int:
    options = report.Options.parse(__doc__)
    torch.manual_seed(options.seed)
    loop = Loop(options)
    loop.run(report.Report(options, loop.evaluate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
