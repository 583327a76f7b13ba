"""Deep Q-learning (Mnih et al. 2015) with double Q-learning (van Hasselt et al. 2016) and n-step returns."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rolecall.jobs.rl.distributions import EpsilonGreedy
from rolecall.jobs.rl.learner import set_gradients
from rolecall.jobs.rl.model import learned_parameters
from rolecall.jobs.rl.off_policy import OffPolicyLearner, first, follow
from rolecall.jobs.rl.replay import Batch
from rolecall.jobs.rl.spaces import Spaces

FINAL_EPSILON = 0.05
EPSILON_DECAY = 10  # times LEARNING_STARTS: steps in which epsilon falls from 1 to FINAL_EPSILON
TARGET_RATE = 0.001  # of the target network, at each optimizer step: with 0.002 and 0.005, CartPole-v1 is forgotten
MAX_GRAD_NORM = 10.0  # global norm that gradients are clipped to


class Dqn(OffPolicyLearner):
    """See the file's docstring. The policy's parameters are the values of the actions."""

    def _begin(self, spaces: Spaces) -> None:
        assert isinstance(self.model.actions, EpsilonGreedy)
        self.actions = self.model.actions
        self.beside = self.target = copy.deepcopy(self.model.policy).requires_grad_(False)
        self._parameters = learned_parameters(self.model.policy)
        self.optimizer = torch.optim.Adam(self._parameters, lr=self.choices.lr, fused=True)

    def _step(self, batch: Batch) -> Tensor:
        policy = self.model.policy
        with torch.no_grad():
            # the action by one network and its value by the other: a maximum of noisy values is too large
            best = first(policy(batch.following)).argmax(-1, keepdim=True)
            values = first(self.target(batch.following)).gather(-1, best).squeeze(-1)
            returns = batch.rewards + batch.discounts * values
        values = first(policy(batch.observations)).gather(-1, batch.actions[:, None]).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(values, returns)
        set_gradients(self._parameters, torch.autograd.grad(loss, self._parameters, allow_unused=True))
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        follow(self.target, policy, TARGET_RATE)
        return torch.stack((torch.zeros_like(loss), loss.detach(), self._entropy))

    @property
    def exploration(self) -> float:
        """See `OffPolicyLearner.exploration`."""
        return float(self.actions.epsilon)

    def _explore(self) -> None:
        start = self.choices.learning_starts
        share = (self.samples - start) / max(1, EPSILON_DECAY * start)
        self.actions.epsilon.fill_(1 - (1 - FINAL_EPSILON) * min(1.0, max(0.0, share)))
        self._entropy = self.actions.entropy(torch.zeros(1, self.actions.size, device=self.device))[0]
