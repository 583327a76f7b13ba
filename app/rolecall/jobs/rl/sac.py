"""Soft actor-critic (Haarnoja et al. 2018), with two critics and a learned entropy coefficient.

Shapes: m are the samples of an optimizer step, k the numbers of an action.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as Pool
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rolecall.jobs.rl.distributions import Squashed
from rolecall.jobs.rl.learner import set_gradients
from rolecall.jobs.rl.model import learned_parameters
from rolecall.jobs.rl.networks import Critics
from rolecall.jobs.rl.off_policy import OffPolicyLearner, first, flush_denormals, follow
from rolecall.jobs.rl.replay import Batch
from rolecall.jobs.rl.spaces import Spaces

TARGET_RATE = 0.005  # of the target critics, at each optimizer step (Haarnoja et al. 2018)
R = TypeVar("R")


class Sac(OffPolicyLearner):
    """See the file's docstring. All gradients are at the same parameters, and one optimizer step changes all, so two
    threads can compute them: one the returns and the policy's gradients, the other the critics'. The policy learns from
    half of a batch, which balances the threads.
    """

    def _begin(self, spaces: Spaces) -> None:
        assert isinstance(self.model.actions, Squashed)
        self.actions = self.model.actions
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            self.critics = Critics(spaces, self.choices.hidden_size).to(self.device)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_coefficient = nn.Parameter(torch.zeros((), device=self.device))
        self.beside = nn.ModuleDict({"critics": self.critics, "target": self.target})
        self.beside.register_parameter("log_coefficient", self.log_coefficient)
        self.dimensions = math.prod(spaces.action_shape)
        self._policy, self._critic = learned_parameters(self.model.policy), list(self.critics.parameters())
        self.optimizer = torch.optim.Adam(
            [*self._policy, *self._critic, self.log_coefficient], lr=self.choices.lr, fused=True
        )
        self._pool = Pool(1, initializer=flush_denormals) if self.threads > 1 else None

    def _step(self, batch: Batch) -> Tensor:
        coefficient = self.log_coefficient.detach().exp()
        # drawn here, because threads would draw in any order
        shape = (2, len(batch.actions), self.dimensions)
        ours, theirs = torch.randn(shape, generator=self._random).to(self.device)
        half = -(-len(ours) // 2)
        under_way = self._run(self._returns, batch, theirs, coefficient)
        policy = self._run(self._policy_gradients, batch.observations[:half], ours[:half], coefficient)
        values = self.critics(batch.observations, batch.actions)
        value_loss = 0.5 * (values - under_way.result()).square().mean(1).sum()
        set_gradients(self._critic, torch.autograd.grad(value_loss, self._critic))
        gradients, policy_loss, entropy = policy.result()
        set_gradients(self._policy, gradients)
        self.log_coefficient.grad = entropy + self.dimensions  # the target is an entropy of -k nats
        self.optimizer.step()
        follow(self.target, self.critics, TARGET_RATE)
        return torch.stack((policy_loss, value_loss.detach(), entropy))

    @property
    def exploration(self) -> float:
        """See `OffPolicyLearner.exploration`."""
        return float(self.log_coefficient.detach().exp())

    def _run(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """Calls the function, in the other thread if there is one, after what was called there before."""
        if self._pool is not None:
            return self._pool.submit(function, *args)
        done = Future[R]()
        done.set_result(function(*args))
        return done

    @torch.no_grad()
    def _returns(self, batch: Batch, normal: Tensor, coefficient: Tensor) -> Tensor:
        """What the critics are to predict [m]."""
        actions, densities = self.actions.draw_with(first(self.model.policy(batch.following)), normal)
        values = self.target(batch.following, actions).amin(0) - coefficient * densities
        returns: Tensor = batch.rewards + batch.discounts * values
        return returns

    def _policy_gradients(
        self, observations: Tensor, normal: Tensor, coefficient: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
        """The gradients of the policy's loss, the loss, and the policy's entropy."""
        actions, densities = self.actions.draw_with(first(self.model.policy(observations)), normal)
        loss = (coefficient * densities - self.critics(observations, actions).amin(0)).mean()
        gradients = torch.autograd.grad(loss, self._policy, allow_unused=True)
        return gradients, loss.detach(), -densities.detach().mean()

    def _explore(self) -> None:
        self.actions.uniform.fill_(self.samples < self.choices.learning_starts)
