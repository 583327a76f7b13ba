"""The learner: one for both ways of inference.

Policy gradient (Williams 1992) with the discounted return of each episode, a learned baseline, normalised advantages,
and the clipped ratio of Schulman et al. 2017 because an iteration makes several optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rolecall.config import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.envs import TERMINATED, Array, Trajectory
from rolecall.jobs.rl.model import ActorCritic, tensor

CHUNK = 2048  # rows in one pass: activations stay in the cache; gradients add up to the minibatch's
DECAY = 0.95  # of the returns' mean and variance, that the baseline's values are normalised by


def discounted_returns(trajectory: Trajectory, values: Array, gamma: float) -> Array:
    """The return [T, n] of each step: discounted rewards up to the episode's end.

    `values` [T+1, n] are the baseline's estimates for the observations. An episode that goes on beyond the rollout, or
    was truncated, had more to come: its tail counts as the estimate there. One that terminated has none. The step after
    an end is no experience; its return is the estimate for the truncated episode's last observation.
    """
    returns = np.empty_like(trajectory.rewards)
    after = values[-1]
    for step in range(len(returns) - 1, -1, -1):
        tail = np.where(trajectory.ends[step] == TERMINATED, 0.0, after)
        after = np.where(trajectory.experience[step], trajectory.rewards[step] + gamma * tail, values[step])
        returns[step] = after
    return returns


@dataclass
class Samples:
    """Columns over an iteration's experience: observations [m, ...], the others [m]."""

    observations: Tensor
    actions: Tensor
    returns: Tensor
    values: Tensor  # then, once the returns are known, advantages
    log_probabilities: Tensor


class Learner:
    """Holds the model and its optimizer; `update` takes one iteration's trajectories.

    Chunks are computed in `threads` threads side by side. Unlike torch's own threads, which meet after every operation,
    they meet once a step, and lose little where the machine is busy with something else.
    """

    def __init__(self, model: ActorCritic, settings: RlSettings, device: torch.device, threads: int = 1) -> None:
        self.model = model.to(device)
        self.settings = settings
        self.device = device
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.version = 0
        self._threads = threads
        self._map = ThreadPoolExecutor(threads).map if threads > 1 else map
        self._mean, self._square = 0.0, 1.0
        self._shuffle = torch.Generator().manual_seed(settings.seed)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One iteration's update. Returns policy_loss, baseline_loss, entropy (nats) and samples."""
        samples = self._samples(trajectories)
        count = len(samples.actions)
        if count == 0:  # every environment only reset: nothing to learn
            return dict.fromkeys(("policy_loss", "baseline_loss", "entropy", "samples"), 0.0)
        decay = DECAY if self.version else 0.0
        self._mean = decay * self._mean + (1 - decay) * float(samples.returns.mean())
        self._square = decay * self._square + (1 - decay) * float(samples.returns.square().mean())
        advantages = samples.returns - samples.values
        samples.values = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
        samples.returns = (samples.returns - self._mean) / self._scale
        self.model.train()
        sums = torch.zeros(3, device=self.device)
        parts = torch.randperm(count, generator=self._shuffle).to(self.device).chunk(self.settings.minibatches)
        for part in parts:
            sums += self._gradient(samples, part) / len(parts)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
        self.version += 1
        policy_loss, baseline_loss, entropy = sums.tolist()
        return {"policy_loss": policy_loss, "baseline_loss": baseline_loss, "entropy": entropy, "samples": float(count)}

    @torch.no_grad()
    def _samples(self, trajectories: Sequence[Trajectory]) -> Samples:
        """All experience in one row each, with what the model, as it acted, makes of it."""
        self.model.eval()
        columns = []
        for trajectory in trajectories:
            steps, count = trajectory.actions.shape
            rows = tensor(trajectory.observations, self.device).flatten(0, 1)
            actions = torch.from_numpy(trajectory.actions.astype(np.int64)).flatten().to(self.device)
            made = list(self._map(self._forward, rows.split(CHUNK)))
            values = torch.cat([value for _, value in made]) * self._scale + self._mean
            logits = torch.cat([logits for logits, _ in made])[: steps * count]
            returns = discounted_returns(trajectory, values.view(steps + 1, count).cpu().numpy(), self.settings.gamma)
            flat_returns = torch.from_numpy(returns).flatten().to(self.device)
            kept = torch.from_numpy(trajectory.experience).flatten().to(self.device).nonzero().squeeze(-1)
            columns.append(
                [column[kept] for column in (rows, actions, flat_returns, values, _log_probability(logits, actions))]
            )
        return Samples(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def _gradient(self, samples: Samples, part: Tensor) -> Tensor:
        """Set the parameters' gradients of the loss over `part` of the samples; its parts: [3]."""
        chunks = part.split(min(CHUNK, -(-len(part) // self._threads)))
        found = list(self._map(lambda rows: self._loss(samples, rows, len(rows) / len(part)), chunks))
        for parameter, *gradients in zip(self.model.parameters(), *(gradients for gradients, _ in found), strict=True):
            some = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = torch.stack(some).sum(0) if some else None
        return torch.stack([parts for _, parts in found]).sum(0)

    def _loss(self, samples: Samples, rows: Tensor, weight: float) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """`weight` of the loss over `rows` of the samples: its gradients, and its parts [3]."""
        s = self.settings
        actions, advantages = samples.actions[rows], samples.values[rows]
        logits, values = self.model(samples.observations[rows])
        ratio = (_log_probability(logits, actions) - samples.log_probabilities[rows]).exp()
        clipped = ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        baseline_loss = nn.functional.smooth_l1_loss(values, samples.returns[rows])
        loss = (policy_loss + s.value_coef * baseline_loss) * weight
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
        with torch.no_grad():
            logs = torch.log_softmax(logits, -1)
            entropy = -(logs.exp() * logs).sum(-1).mean()
            return gradients, torch.stack((policy_loss, baseline_loss, entropy)) * weight

    @torch.no_grad()
    def _forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits, values = self.model(rows)
        return logits, values

    @property
    def _scale(self) -> float:
        return float(max(self._square - self._mean**2, 1e-6) ** 0.5)

    def state(self) -> dict[str, Any]:
        """Everything that `load` needs to go on exactly from here."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "mean": self._mean,
            "square": self._square,
            "shuffle": self._shuffle.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Raises UsageError where the state is of another model."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.version, self._mean, self._square = state["version"], state["mean"], state["square"]
            self._shuffle.set_state(state["shuffle"])
        except (RuntimeError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise UsageError(
                f"the checkpoint is of another model ({first}); set ENV_ID, POLICY and HIDDEN_SIZE as they were, or "
                "name another CHECKPOINT_DIR"
            ) from error
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr  # LR may have been changed since


def _log_probability(logits: Tensor, actions: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, actions[:, None]).squeeze(-1)
