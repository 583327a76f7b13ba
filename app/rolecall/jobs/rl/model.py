"""The model: a policy from observations to the parameters of the distribution of actions, and a value.

Shapes: m are observations, ... an observation's own shape, p the distribution's parameters, S a recurrent policy's
state, L the steps of a sequence, b sequences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, envs, networks
from rolecall.jobs.rl.defaults import Hyperparameters, OnPolicy, choose
from rolecall.jobs.rl.distributions import Distribution, EpsilonGreedy, Squashed, distribution
from rolecall.jobs.rl.messages import Array, PolicyState
from rolecall.jobs.rl.spaces import Spaces, is_bounded, shown

BASELINE = "baseline."


class ActorCritic(nn.Module):
    """A policy and its baseline. `baseline` is None if the policy itself returns a value, or if the learner has the
    critics (sac, dqn).
    """

    def __init__(
        self,
        policy: nn.Module,
        baseline: nn.Module | None,
        actions: Distribution,
        normalizer: networks.Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.policy, self.baseline, self.actions, self.normalizer = policy, baseline, actions, normalizer

    @property
    def state_size(self) -> int:
        """Size of the state of a recurrent policy; 0 for others."""
        return int(getattr(self.policy, "state_size", 0))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters [m, p] and normalised values [m] of observations [m, ...]; for a policy without a state."""
        observations = self.prepared(observations)
        out = self.policy(observations)
        parameters, value = out if self.baseline is None else (out, self.baseline(observations))
        return parameters, value.reshape(-1)

    def value(self, observations: Tensor) -> Tensor:
        """Normalised values [m] of observations [m, ...]; for a policy without a state."""
        observations = self.prepared(observations)
        value = self.policy(observations)[1] if self.baseline is None else self.baseline(observations)
        return value.reshape(-1)  # type: ignore[no-any-return]

    @property
    def value_layer(self) -> nn.Linear | None:
        """The last layer of the value of the default networks; None for a user's."""
        if isinstance(self.policy, networks.Shared):
            layer: nn.Module = self.policy.value
        else:
            layer = self.baseline[-1] if isinstance(self.baseline, nn.Sequential) else nn.Identity()
        return layer if isinstance(layer, nn.Linear) else None

    def act(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters [m, p] for observations [m, ...], and the next state [m, S]. Does not use the baseline."""
        if not self.state_size:
            out = self.policy(self.prepared(observations))
            return (out if isinstance(out, Tensor) else out[0]), state
        out = self.policy(self.prepared(observations), state)
        return out[0], out[-1]

    def unroll(self, observations: Tensor, state: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters [L, b, p] and normalised values [L, b] of observations [L, b, ...], from state [b, S] on. The
        state is reset to zeros after a step that `ends` [L, b] an episode.
        """
        if not self.state_size:
            parameters, values = self(observations.flatten(0, 1))
            return parameters.unflatten(0, ends.shape), values.unflatten(0, ends.shape)
        observations = self.prepared(observations)
        if isinstance(self.policy, networks.Recurrent):
            parameters, values, _ = self.policy.unroll(observations, state, ends)
            return parameters, values
        every, several = [], []
        for step, ended in zip(observations, ends, strict=True):
            parameters, *value, state = self.policy(step, state)
            value = value or [self.baseline(step)]  # type: ignore[misc]  # a policy without a value has a baseline
            every.append(parameters)
            several.append(value[0].reshape(-1))
            state = state * (~ended)[:, None].to(state.dtype)
        return torch.stack(every), torch.stack(several)

    def prepared(self, observations: Tensor) -> Tensor:
        """The observations as float32 and normalised."""
        observations = observations.float()
        return observations if self.normalizer is None else self.normalizer(observations)

    def policy_state(self) -> PolicyState:
        """The policy without the baseline, on the CPU. The tensors may be those of the model."""
        return {name: value.cpu() for name, value in self.state_dict().items() if not name.startswith(BASELINE)}


def build(settings: RlSettings, spaces: Spaces, choices: Hyperparameters | None = None) -> ActorCritic:
    """The model for these spaces, initialised from SEED. Raises UsageError if POLICY gives none, and for spaces or
    settings that ALGORITHM has no model for.
    """
    choices = choices or choose(settings, spaces)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        normalized = choices.normalize and spaces.numbers
        normalizer = networks.Normalizer(spaces.observation, spaces.parts) if normalized else None
        if not isinstance(choices, OnPolicy):
            actions = _off_policy(settings, spaces)
            if settings.policy:
                return _users(settings, spaces, actions, None, normalizer)
            body, features = networks.encoder(spaces, choices.hidden_size, networks.relu)
            policy: nn.Module = nn.Sequential(body, networks.Output(features, actions.size, False))
            return ActorCritic(policy, None, actions, normalizer)
        if settings.policy:
            baseline = functools.partial(_baseline, spaces, choices, settings)
            return _users(settings, spaces, distribution(spaces.action), baseline, normalizer)
        plain = settings.memory == "none" and choices.exploration == "gaussian" and not spaces.pixels
        if settings.algorithm == "reinforce" and plain:  # the tutorial's network
            actions = distribution(spaces.action)
            size, hidden = math.prod(spaces.observation.shape), choices.hidden_size
            policy = networks.tutorial(size, hidden, actions.size)
            return ActorCritic(policy, _baseline(spaces, choices, settings), actions, normalizer)
        body, features = networks.encoder(spaces, choices.hidden_size)
        seen = features if settings.memory == "none" else choices.hidden_size
        passed = choices.exploration == "sde" and spaces.continuous
        actions = distribution(spaces.action, seen if passed else 0)
        output = networks.Output(seen, actions.size - (seen if passed else 0), passed)
        if settings.memory != "none":
            policy = networks.Recurrent(body, features, seen, output)
        elif spaces.pixels:
            policy = networks.Shared(body, features, output)
        else:
            return ActorCritic(nn.Sequential(body, output), _baseline(spaces, choices, settings), actions, normalizer)
        return ActorCritic(policy, None, actions, normalizer)


def _off_policy(settings: RlSettings, spaces: Spaces) -> Distribution:
    """The distribution of actions of sac or dqn. Raises UsageError for spaces and settings that they do not learn."""
    name = f"ALGORITHM={settings.algorithm}"
    if settings.memory != "none":
        raise UsageError(f"{name} and MEMORY={settings.memory}: it learns from single steps; leave MEMORY out")
    space = spaces.action
    if settings.algorithm == "dqn":
        if not isinstance(space, Discrete):
            raise UsageError(f"{name}: learns the values of Discrete actions, and these are {shown(space)}; use ppo")
        return EpsilonGreedy(int(space.n))
    if not isinstance(space, Box) or not is_bounded(space).all():
        raise UsageError(f"{name}: learns actions of a Box with two bounds, and these are {shown(space)}; use ppo")
    return Squashed(math.prod(space.shape))


def _baseline(spaces: Spaces, choices: Hyperparameters, settings: RlSettings) -> nn.Module:
    size = math.prod(spaces.observation.shape)
    if settings.algorithm == "reinforce" and not spaces.pixels:
        # half as wide: CartPole takes 2 iterations in 70 more, and an update a quarter less time
        return networks.tutorial(size, max(1, choices.hidden_size // 2), 1)
    body, features = networks.encoder(spaces, choices.hidden_size)
    return nn.Sequential(body, networks.initialised(nn.Linear(features, 1), 1.0))


def _users(
    settings: RlSettings,
    spaces: Spaces,
    actions: Distribution,
    baseline: Callable[[], nn.Module] | None,
    normalizer: networks.Normalizer | None,
) -> ActorCritic:
    """The model of POLICY. Its `baseline` is made if the policy returns no value; None: the algorithm has none, and
    the policy no state."""
    if settings.memory != "none":
        raise UsageError(
            f"POLICY={settings.policy} and MEMORY={settings.memory}: MEMORY is the default policy's; give yours a "
            "state_size, or leave MEMORY out"
        )
    if settings.exploration == "sde":
        raise UsageError(f"POLICY={settings.policy} and EXPLORATION=sde: it needs the default policy's features")
    policy = settings.build("policy", spaces.observation, spaces.action)
    if not isinstance(policy, nn.Module):
        raise UsageError(f"POLICY={settings.policy}: makes a {type(policy).__name__}, not a torch module")
    size = getattr(policy, "state_size", 0)
    if not isinstance(size, int) or size < 0:
        raise UsageError(f"POLICY={settings.policy}: its state_size is {size!r}, not a number")
    if size and baseline is None:
        raise UsageError(
            f"POLICY={settings.policy}: has a state, and ALGORITHM={settings.algorithm} learns from steps; use ppo"
        )
    with UsageError.wrap(f"POLICY={settings.policy}: raised an error"), torch.no_grad():
        observations = torch.zeros(2, *spaces.observation.shape)
        out = policy.eval()(*([observations, torch.zeros(2, size)] if size else [observations]))
    state = [(2, size)] if size else []
    given = list(out) if isinstance(out, tuple | list) and len(out) > 1 else [out]
    if problem := _problem(given, [[(2, actions.size), *value, *state] for value in ([], [(2,)], [(2, 1)])]):
        raise UsageError(
            f"POLICY={settings.policy}: {problem}; {spaces.action} needs float32 parameters of shape (n, "
            f"{actions.size}), alone or with values (n){f', and a state (n, {size})' if size else ''}"
        )
    with_value = len(given) == (3 if size else 2)
    return ActorCritic(policy, None if with_value or baseline is None else baseline(), actions, normalizer)


def _problem(out: list[Any], shapes: list[list[tuple[int, ...]]]) -> str:
    """The problem with a policy's answer to 2 observations, which may have one of `shapes`; empty if there is none."""
    kinds = [f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in out]
    numbers = all(isinstance(each, Tensor) and each.is_floating_point() for each in out)
    if not numbers or [tuple(each.shape) for each in out] not in shapes or out[0].dtype != torch.float32:
        return f"returns {', '.join(kinds) or 'nothing'} for 2 observations"
    return "" if all(each.isfinite().all() for each in out) else "returns numbers that are not finite for zeros"


def to_tensor(observations: Array, device: torch.device) -> Tensor:
    """Observations as float32; bytes, such as pixels, stay bytes until a network converts them."""
    if observations.dtype not in (np.float32, np.uint8):
        observations = observations.astype(np.float32)
    elif not observations.flags.writeable:
        observations = observations.copy()  # torch warns of memory that is read-only
    return torch.from_numpy(observations).to(device)


def learned_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module but for those that a POLICY has frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def check(settings: RlSettings) -> None:
    """Checks ENV_ID and POLICY before the job starts. Raises UsageError."""
    build(settings, envs.describe(settings).spaces)
