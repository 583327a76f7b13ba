"""The learner: one for both ways of inference.

Policy gradient (Williams 1992) with the discounted return of each episode, a learned baseline, normalised advantages,
and the clipped ratio of Schulman et al. 2017 because an iteration makes several optimizer steps.

Shapes: T are the steps of a rollout, n the environments of a group, m an iteration's samples, ... an observation's own
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.messages import Array, Done, PolicyState, Trajectory
from rolecall.jobs.rl.model import ActorCritic, to_tensor

CHUNK = 2048  # rows in one pass: activations stay in the cache; gradients add up to the minibatch's
DECAY = 0.95  # of the returns' mean and variance, that the baseline's values are normalised by
VALUE_COEF = 0.5  # of the baseline's loss: PPO's usual half; with networks of their own, Adam makes it matter little


class Update(NamedTuple):
    """An update's mean losses, the policy's mean entropy in nats, and the number of samples."""

    policy_loss: float
    baseline_loss: float
    entropy: float
    samples: int


def discounted_returns(trajectory: Trajectory, values: Array, gamma: float) -> Array:
    """The return [T, n] of each step: discounted rewards up to the episode's end.

    `values` [T+1, n] are the baseline's estimates for the observations. Where an episode continues beyond the rollout,
    or was truncated, the estimate there stands for the rewards that would have followed. Where it terminated, none
    follow. The step after an end is no experience; its return is the estimate for the truncated episode's last
    observation.
    """
    returns = np.empty_like(trajectory.rewards)
    after = values[-1]
    for step in range(len(returns) - 1, -1, -1):
        tail = np.where(trajectory.dones[step] == Done.TERMINATED, 0.0, after)
        after = np.where(trajectory.experience[step], trajectory.rewards[step] + gamma * tail, values[step])
        returns[step] = after
    return returns


@dataclass
class Samples:
    """Columns over an iteration's experience: observations [m, ...], the others [m].

    Returns and advantages are normalised by `Learner.update`; the log probabilities are those of the policy that acted.
    """

    observations: Tensor
    actions: Tensor
    returns: Tensor
    advantages: Tensor
    log_probabilities: Tensor


class Learner:
    """Holds the model, in evaluation mode, and its optimizer; `update` takes one iteration's trajectories.

    `threads` threads compute chunks in parallel. Unlike torch's own threads, which synchronise after every operation,
    they synchronise once a step, and lose little on a busy machine.
    """

    def __init__(self, model: ActorCritic, settings: RlSettings, device: torch.device, threads: int = 1) -> None:
        self.model = model.to(device).eval()
        self.settings = settings
        self.device = device
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.version = 0
        self._threads = threads
        self._map = ThreadPoolExecutor(threads).map if threads > 1 else map
        self._mean, self._square = 0.0, 1.0
        self._shuffle = torch.Generator().manual_seed(settings.seed)

    def update(self, trajectories: Sequence[Trajectory]) -> Update:
        """Makes one iteration's update: MINIBATCHES optimizer steps."""
        samples = self._samples(trajectories)
        count = len(samples.actions)
        if count == 0:  # every environment only reset: nothing to learn
            return Update(0.0, 0.0, 0.0, 0)
        decay = DECAY if self.version else 0.0
        self._mean = decay * self._mean + (1 - decay) * float(samples.returns.mean())
        self._square = decay * self._square + (1 - decay) * float(samples.returns.square().mean())
        advantages = samples.advantages
        samples.advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
        samples.returns = (samples.returns - self._mean) / self._scale
        self.model.train()
        sums = torch.zeros(3, device=self.device)
        parts = torch.randperm(count, generator=self._shuffle).to(self.device).chunk(self.settings.minibatches)
        for part in parts:
            sums += self._gradient(samples, part) / len(parts)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
        self.model.eval()
        self.version += 1
        policy_loss, baseline_loss, entropy = sums.tolist()
        return Update(policy_loss, baseline_loss, entropy, count)

    @torch.no_grad()
    def _samples(self, trajectories: Sequence[Trajectory]) -> Samples:
        """An iteration's experience, with what the model makes of it as it acted. Nothing is normalised yet."""
        columns = []
        for trajectory in trajectories:
            steps, n = trajectory.actions.shape
            rows = to_tensor(trajectory.observations, self.device).flatten(0, 1)
            actions = torch.from_numpy(trajectory.actions.astype(np.int64)).flatten().to(self.device)
            chunks = list(self._map(self._forward, rows.split(CHUNK)))
            logits = torch.cat([logits for logits, _ in chunks])[: steps * n]
            values = torch.cat([values for _, values in chunks]) * self._scale + self._mean
            by_step = discounted_returns(trajectory, values.view(steps + 1, n).cpu().numpy(), self.settings.gamma)
            returns = torch.from_numpy(by_step).flatten().to(self.device)
            used = torch.from_numpy(trajectory.experience).flatten().to(self.device).nonzero().squeeze(-1)
            advantages = returns - values[: steps * n]
            columns.append(
                [column[used] for column in (rows, actions, returns, advantages, _log_probability(logits, actions))]
            )
        return Samples(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def _gradient(self, samples: Samples, part: Tensor) -> Tensor:
        """Sets the parameters' gradients of the loss over the samples `part` (indices). Returns `_loss`'s parts [3]."""
        chunks = part.split(min(CHUNK, -(-len(part) // self._threads)))
        losses = list(self._map(lambda rows: self._loss(samples, rows, len(rows) / len(part)), chunks))
        for parameter, *gradients in zip(self.model.parameters(), *(gradients for gradients, _ in losses), strict=True):
            used = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = torch.stack(used).sum(0) if used else None
        return torch.stack([parts for _, parts in losses]).sum(0)

    def _loss(self, samples: Samples, rows: Tensor, weight: float) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """The loss over the samples `rows` (indices), times `weight`: its gradients, and the policy's loss, the
        baseline's and the entropy [3].
        """
        clip_ratio = self.settings.clip_ratio
        actions, advantages = samples.actions[rows], samples.advantages[rows]
        logits, values = self.model(samples.observations[rows])
        ratio = (_log_probability(logits, actions) - samples.log_probabilities[rows]).exp()
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        baseline_loss = nn.functional.smooth_l1_loss(values, samples.returns[rows])
        loss = (policy_loss + VALUE_COEF * baseline_loss) * weight
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
        with torch.no_grad():
            log_probabilities = torch.log_softmax(logits, -1)
            entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
            return gradients, torch.stack((policy_loss, baseline_loss, entropy)) * weight

    @torch.no_grad()
    def _forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(rows)  # type: ignore[no-any-return]

    @property
    def _scale(self) -> float:
        return float(max(self._square - self._mean**2, 1e-6) ** 0.5)

    def policy_state(self) -> PolicyState:
        """The policy without its baseline, on the CPU, for observers."""
        return {name: value.cpu() for name, value in self.model.policy.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to continue exactly from here."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "mean": self._mean,
            "square": self._square,
            "shuffle": self._shuffle.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`, with this LR."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr
        self.version, self._mean, self._square = state["version"], state["mean"], state["square"]
        self._shuffle.set_state(state["shuffle"])


def _log_probability(logits: Tensor, actions: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, actions[:, None]).squeeze(-1)
