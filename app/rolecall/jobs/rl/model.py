"""The policy: from observations to actions, with a baseline beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, envs
from rolecall.jobs.rl.messages import Array, PolicyState


class Rows(nn.Module):
    """Each observation as one row; nn.Flatten refuses observations that are single numbers."""

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [n, ...] as [n, size]."""
        return observations.reshape(len(observations), -1)


def mlp(inputs: int, hidden: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """One hidden layer, as in the tutorial: [n, ...] to [n, outputs]."""
    between = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(Rows(), nn.Linear(inputs, hidden), *between, nn.ReLU(inplace=True), nn.Linear(hidden, outputs))


class ActorCritic(nn.Module):
    """A policy and its baseline. `baseline` is None where the policy itself returns (logits, value)."""

    def __init__(self, policy: nn.Module, baseline: nn.Module | None) -> None:
        super().__init__()
        self.policy = policy
        self.baseline = baseline

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, actions] and normalised values [n] of observations [n, ...]."""
        if self.baseline is None:
            logits, value = self.policy(observations)
        else:
            logits, value = self.policy(observations), self.baseline(observations)
        return logits, value.reshape(-1)

    def logits(self, observations: Tensor) -> Tensor:
        """Logits [n, actions] of observations [n, ...]."""
        out = self.policy(observations)
        return out if isinstance(out, Tensor) else out[0]


def build(settings: RlSettings, observation: Box, action: Discrete) -> ActorCritic:
    """The model for these spaces, initialised from SEED. Raises UsageError where POLICY does not give one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        size = int(np.prod(observation.shape))
        # half as wide: two iterations in 70 more on CartPole, for a quarter less work in each update
        baseline = mlp(size, max(1, settings.hidden_size // 2), 1)
        if not settings.policy:
            return ActorCritic(mlp(size, settings.hidden_size, int(action.n), settings.dropout), baseline)
        policy = settings.build("policy", observation, action)
        if not isinstance(policy, nn.Module):
            raise UsageError(f"POLICY={settings.policy}: makes a {type(policy).__name__}, not a torch module")
        with UsageError.wrap(f"POLICY={settings.policy}: raised an error"), torch.no_grad():
            out = policy.eval()(to_tensor(np.zeros((2, *observation.shape), observation.dtype), torch.device("cpu")))
    if problem := _problem(out, int(action.n)):
        raise UsageError(f"POLICY={settings.policy}: {problem}; {action} needs logits of shape (n, {action.n})")
    return ActorCritic(policy, baseline if isinstance(out, Tensor) else None)


def _problem(out: Any, actions: int) -> str:
    """What is wrong with a policy's answer to 2 observations; empty where nothing is."""
    pair = isinstance(out, (tuple, list)) and len(out) == 2
    logits, value = out if pair else (out, None)
    if not isinstance(logits, Tensor):
        return f"returns a {type(out).__name__}, not logits or (logits, value)"
    if logits.shape != (2, actions) or not logits.is_floating_point():
        return f"makes logits of shape {tuple(logits.shape)} and type {logits.dtype} for 2 observations"
    if pair and not (isinstance(value, Tensor) and value.shape in ((2,), (2, 1)) and value.is_floating_point()):
        kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"that is a {type(value).__name__}"
        return f"makes beside its logits a value {kind} for 2 observations, not one number each"
    return ""


def to_tensor(observations: Array, device: torch.device) -> Tensor:
    """Observations as the float32 that policies compute with."""
    if observations.dtype != np.float32:
        observations = observations.astype(np.float32)
    elif not observations.flags.writeable:
        observations = observations.copy()  # torch warns of memory that it could not write to
    return torch.from_numpy(observations).to(device)


class Actor:
    """Acts with a model's policy: observations [n, ...] in, actions [n] int64, counted from 0, out."""

    def __init__(self, model: ActorCritic, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device

    def load(self, policy: PolicyState) -> None:
        """Acts with this policy from now on."""
        self.model.policy.load_state_dict(policy)
        self.model.eval()

    @torch.inference_mode()
    def act(self, observations: Array) -> Array:
        """Samples an action for each of the observations."""
        logits = self.model.logits(to_tensor(observations, self.device))
        # the exponential race: argmin of Exp(1)/p is a sample of p
        race = torch.empty_like(logits).exponential_().log_()
        actions: Array = (logits - race).argmax(-1).cpu().numpy()
        return actions

    @torch.inference_mode()
    def best(self, observations: Array) -> Array:
        """The most probable action for each of the observations."""
        actions: Array = self.model.logits(to_tensor(observations, self.device)).argmax(-1).cpu().numpy()
        return actions


def check(settings: RlSettings) -> None:
    """Refuses what can never work, before anything starts. Raises UsageError."""
    env = envs.describe(settings.env_id)
    build(settings, env.observation, env.action)
