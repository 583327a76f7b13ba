"""The learner: one for both ways of inference.

Policy gradient (Williams 1992) with the discounted return of each episode, a learned baseline, normalised advantages,
and the clipped ratio of Schulman et al. 2017 because an iteration makes several optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.config import UsageError
from app.jobs.rl import RlSettings
from app.jobs.rl.envs import TERMINATED, Array, Trajectory
from app.jobs.rl.model import ActorCritic, tensor

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


class Learner:
    """Holds the model and its optimizer; `update` takes one iteration's trajectories."""

    def __init__(self, model: ActorCritic, settings: RlSettings, device: torch.device) -> None:
        self.model = model.to(device)
        self.settings = settings
        self.device = device
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.version = 0
        self._mean, self._square = 0.0, 1.0
        self._shuffle = torch.Generator().manual_seed(settings.seed)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One iteration's update. Returns policy_loss, baseline_loss, entropy (nats) and samples."""
        self.model.train()
        observations, actions, returns, values = self._samples(trajectories)
        decay = DECAY if self.version else 0.0
        self._mean = decay * self._mean + (1 - decay) * float(returns.mean())
        self._square = decay * self._square + (1 - decay) * float(returns.square().mean())
        advantages = returns - values
        advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
        targets = (returns - self._mean) / self._scale
        with torch.no_grad():
            before = _log_probability(self.model.logits(observations), actions)
        sums = {"policy_loss": 0.0, "baseline_loss": 0.0, "entropy": 0.0}
        parts = torch.randperm(len(actions), generator=self._shuffle).chunk(self.settings.minibatches)
        for part in parts:
            part = part.to(self.device)
            stats = self._step(observations[part], actions[part], advantages[part], targets[part], before[part])
            for name, value in stats.items():
                sums[name] += value / len(parts)
        self.version += 1
        return {**sums, "samples": float(len(actions))}

    def _samples(self, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = []
        for trajectory in trajectories:
            steps, count = trajectory.actions.shape
            rows = tensor(trajectory.observations.reshape((steps + 1) * count, *trajectory.observations.shape[2:]),
                          self.device)  # fmt: skip
            with torch.no_grad():
                values = self.model(rows)[1].cpu().numpy().reshape(steps + 1, count) * self._scale + self._mean
            kept = torch.from_numpy(trajectory.experience.reshape(-1)).to(self.device)
            flat = [
                torch.from_numpy(np.ascontiguousarray(array)).reshape(-1).to(self.device)[kept]
                for array in (
                    trajectory.actions.astype(np.int64),
                    discounted_returns(trajectory, values, self.settings.gamma),
                    values[:-1],
                )
            ]
            columns.append((rows[: steps * count][kept], flat[0], flat[1].float(), flat[2].float()))
        observations, actions, returns, values = (torch.cat(column) for column in zip(*columns, strict=True))
        return observations, actions, returns, values

    def _step(
        self, observations: Tensor, actions: Tensor, advantages: Tensor, targets: Tensor, before: Tensor
    ) -> dict[str, float]:
        s = self.settings
        logits, values = self.model(observations)
        chosen = _log_probability(logits, actions)
        ratio = (chosen - before).exp()
        clipped = ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        baseline_loss = F.smooth_l1_loss(values, targets)
        self.optimizer.zero_grad()
        (policy_loss + s.value_coef * baseline_loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), s.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            logs = torch.log_softmax(logits, -1)
            entropy = -(logs.exp() * logs).sum(-1).mean()
        return {"policy_loss": policy_loss.item(), "baseline_loss": baseline_loss.item(), "entropy": entropy.item()}

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
        except (RuntimeError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise UsageError(
                f"the checkpoint is of another model ({first}); set ENV_ID, POLICY and HIDDEN_SIZE as they were, or "
                "name another CHECKPOINT_DIR"
            ) from error
        self.version, self._mean, self._square = state["version"], state["mean"], state["square"]
        self._shuffle.set_state(state["shuffle"])


def _log_probability(logits: Tensor, actions: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, actions[:, None]).squeeze(-1)
