"""Soft actor-critic (Haarnoja et al. 2018), with two critics and a learned entropy coefficient.

Shapes: m are the samples of an optimizer step, k the numbers of an action.
"""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.defaults import OffPolicy
from rolecall.jobs.rl.distributions import Squashed
from rolecall.jobs.rl.model import ActorCritic
from rolecall.jobs.rl.networks import Critics
from rolecall.jobs.rl.off_policy import OffPolicyLearner, first, follow, set_gradients
from rolecall.jobs.rl.replay import Batch
from rolecall.jobs.rl.spaces import Spaces


class Sac(OffPolicyLearner):
    """See the file's docstring. With several threads, one computes the gradients of the critics and another those of
    the policy. So both are gradients at the same parameters, and one optimizer step changes all.
    """

    def __init__(
        self,
        model: ActorCritic,
        settings: RlSettings,
        choices: OffPolicy,
        spaces: Spaces,
        device: torch.device,
        threads: int = 1,
    ) -> None:
        super().__init__(model, settings, choices, spaces, device, threads)
        assert isinstance(model.actions, Squashed)
        self.actions = model.actions
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.critics = Critics(spaces, choices.hidden_size).to(device)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_coefficient = nn.Parameter(torch.zeros((), device=device))
        self.dimensions = math.prod(spaces.action_shape)
        self._policy, self._critic = list(model.policy.parameters()), list(self.critics.parameters())
        self.optimizer = torch.optim.Adam(
            [*self._policy, *self._critic, self.log_coefficient], lr=choices.lr, fused=True
        )
        self._pool = ThreadPoolExecutor(1) if threads > 1 else None

    def _step(self, batch: Batch) -> Tensor:
        coefficient = self.log_coefficient.detach().exp()
        # drawn here, because threads would draw in any order
        shape = (2, len(batch.actions), self.dimensions)
        ours, theirs = torch.randn(shape, generator=self._draws).to(self.device)
        if self._pool is None:
            policy = self._policy_gradients(batch, ours, coefficient)
            critic = self._critic_gradients(batch, theirs, coefficient)
        else:
            under_way = self._pool.submit(self._policy_gradients, batch, ours, coefficient)
            critic = self._critic_gradients(batch, theirs, coefficient)
            policy = under_way.result()
        (policy_gradients, policy_loss, entropy), (critic_gradients, value_loss) = policy, critic
        set_gradients(self._policy, policy_gradients)
        set_gradients(self._critic, critic_gradients)
        self.log_coefficient.grad = entropy + self.dimensions  # the target is an entropy of -k nats
        self.optimizer.step()
        follow(self.target, self.critics)
        return torch.stack((policy_loss, value_loss, entropy, coefficient))

    def _policy_gradients(
        self, batch: Batch, normal: Tensor, coefficient: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
        """The gradients of the policy's loss, the loss, and the policy's entropy."""
        actions, densities = self.actions.draw_with(first(self.model.policy(batch.observations)), normal)
        values = self.critics(batch.observations, actions).amin(0)
        loss = (coefficient * densities - values).mean()
        return torch.autograd.grad(loss, self._policy, allow_unused=True), loss.detach(), -densities.detach().mean()

    def _critic_gradients(self, batch: Batch, normal: Tensor, coefficient: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The gradients of the critics' loss, and the loss."""
        with torch.no_grad():
            actions, densities = self.actions.draw_with(first(self.model.policy(batch.following)), normal)
            values = self.target(batch.following, actions).amin(0) - coefficient * densities
            returns = batch.rewards + batch.discounts * values
        loss = 0.5 * (self.critics(batch.observations, batch.actions) - returns).square().mean(1).sum()
        return torch.autograd.grad(loss, self._critic), loss.detach()

    def _explore(self) -> None:
        self.actions.uniform.fill_(self.samples < self.choices.learning_starts)

    def state_dict(self) -> dict[str, Any]:
        """See `OffPolicyLearner.state_dict`."""
        beside = {"critics": self.critics.state_dict(), "target": self.target.state_dict()}
        return {**super().state_dict(), **beside, "log_coefficient": self.log_coefficient.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `OffPolicyLearner.load_state_dict`."""
        super().load_state_dict(state)
        self.critics.load_state_dict(state["critics"])
        self.target.load_state_dict(state["target"])
        with torch.no_grad():
            self.log_coefficient.copy_(state["log_coefficient"])
