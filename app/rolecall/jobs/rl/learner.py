"""What the learners have in common: PPO learns from an iteration's samples, SAC and DQN from a replay buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Sharded
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.defaults import Hyperparameters
from rolecall.jobs.rl.messages import PolicyState, Trajectory
from rolecall.jobs.rl.model import ActorCritic, to_tensor


class Learner:
    """Holds the model, in evaluation mode, and its optimizer, which a subclass makes. Its state, with that of its
    shares, is what training continues from.

    `version` is the number of updates before, `optimizer_steps` that of optimizer steps.
    """

    optimizer: torch.optim.Adam

    def __init__(
        self,
        model: ActorCritic,
        settings: RlSettings,
        choices: Hyperparameters,
        device: torch.device,
        threads: int = 1,
    ) -> None:
        self.model = model.to(device).eval()
        self.settings, self.choices, self.device, self.threads = settings, choices, device, threads
        self.version, self.optimizer_steps = 0, 0
        self._random = torch.Generator().manual_seed(settings.seed)  # on the CPU

    @property
    def rollout_steps(self) -> int:
        """The steps of each environment in the next rollouts."""
        return self.choices.rollout_steps

    def update(self, trajectories: Sequence[Trajectory], progress: float = 0.0, longest: int = 0) -> dict[str, float]:
        """Learns from the trajectories of an iteration. Returns the values to log, by the names of metrics.

        `progress` is the completed share of the training, 0 to 1, and `longest` the steps that an episode may have.
        """
        raise NotImplementedError

    def _normalize(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds the observations to the statistics of the model."""
        if self.model.normalizer is not None:
            for trajectory in trajectories:
                seen = to_tensor(trajectory.observations[:-1][trajectory.experience], self.device)
                self.model.normalizer.update(seen)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def policy_state(self) -> PolicyState:
        """The policy that acts next, on the CPU. The tensors may be those of the model."""
        return self.model.policy_state()

    def shares(self, context: Context[RlSettings]) -> dict[str, Sharded]:
        """The parts of the state that are too large for `state_dict`, as `Context.restore` takes them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state from which training continues exactly."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`, at the LR of the settings."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._set_rate(self.choices.lr)
        self.version = state["version"]
        self.optimizer_steps = state.get("optimizer_steps", 0)  # an earlier version's checkpoint lacks it


def set_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Sets the gradients that the optimizer uses."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
