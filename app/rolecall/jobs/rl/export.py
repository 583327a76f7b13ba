"""`rolecall export rl`: the policy from observations to actions of the environment, normalisation included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor, nn

from rolecall import Exported
from rolecall.jobs.rl import RlSettings, envs
from rolecall.jobs.rl.evaluate import SEED_OFFSET, restore
from rolecall.jobs.rl.messages import Done
from rolecall.jobs.rl.model import ActorCritic, to_tensor
from rolecall.jobs.rl.spaces import Actions, Spaces, shown
from rolecall.jobs.rl.stepping import Envs

ENVIRONMENTS, STEPS = 8, 100  # on which the exported policy is compared
STATE, NEXT_STATE = "state", "next_state"


class ExportedActions(nn.Module):
    """`spaces.Actions` in torch: converts actions of a policy to those of `space`."""

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, space: Space[Any]) -> None:
        super().__init__()
        self.shape, actions = space.shape or (), Actions(space)
        self.scaled, self.whole = actions.scaled, actions.whole
        self.dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        for name, values in actions.numbers.items():
            self.register_buffer(name, torch.from_numpy(np.array(values)))

    def forward(self, actions: Tensor) -> Tensor:
        """Actions [batch, A], or [batch] of one choice, to those of the environment [batch, ...]."""
        values = actions.reshape(actions.shape[0], -1)
        if self.scaled:
            values = self.centre + self.scale * values
            values = values.round() if self.whole else values
            values = torch.minimum(torch.maximum(values, self.low), self.high)
        else:
            values = values + self.centre
        return values.reshape(actions.shape[0], *self.shape).to(self.dtype)


class ExportedPolicy(nn.Module):
    """Maps observations, and the state of a recurrent policy, to the most probable actions, the parameters of the
    distribution of actions, and the next state.
    """

    def __init__(self, trained: ActorCritic, spaces: Spaces) -> None:
        super().__init__()
        self.normalizer, self.policy, self.distribution = trained.normalizer, trained.policy, trained.actions
        self.actions = ExportedActions(spaces.action)

    def forward(self, observations: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """Observations [batch, ...] to actions [batch, ...] and parameters [batch, p]. A state [batch, S] is zeros at
        the start of an episode.
        """
        observations = observations.float()
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        out = self.policy(observations) if state is None else self.policy(observations, state)
        parameters = out if isinstance(out, Tensor) else out[0]
        answer = self.actions(self.distribution.best(parameters)), parameters
        return answer if state is None else (*answer, out[-1])


def export(settings: RlSettings, state: dict[str, Any]) -> Exported:
    """See `ExportedPolicy`. Raises UsageError as `evaluate` does."""
    spaces, cpu = envs.describe(settings).spaces, torch.device("cpu")
    trained = restore(settings, spaces, state).eval()
    recurrent, as_the_environments = bool(trained.state_size), Actions(spaces.action)

    @torch.no_grad()
    def reference(observations: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        before = torch.zeros(len(observations), 0) if state is None else state
        parameters, after = trained.act(observations, before)
        actions = as_the_environments(trained.actions.best(parameters).numpy())
        return (torch.from_numpy(np.array(actions)), parameters, *([after] if recurrent else []))

    def inputs(observations: Tensor, state: Tensor) -> dict[str, Tensor]:
        return {"observations": observations, **({STATE: state} if recurrent else {})}

    def batches() -> Iterator[dict[str, Tensor]]:
        state = torch.zeros(ENVIRONMENTS, trained.state_size)
        with contextlib.closing(Envs(settings, ENVIRONMENTS, settings.seed + SEED_OFFSET)) as group:
            yield inputs(to_tensor(group.observations[:1], cpu), state[:1])
            for _ in range(STEPS):
                observations = to_tensor(group.observations, cpu)
                yield inputs(observations, state)
                parameters, state = trained.act(observations, state)
                state = state * torch.from_numpy(group.dones == Done.CONTINUES)[:, None]
                group.step(trained.actions.best(parameters).numpy())

    names = ["observations", *([STATE] if recurrent else [])]
    zeros = np.zeros((2, *spaces.observation.shape), spaces.observation.dtype)
    example = inputs(to_tensor(zeros, cpu), torch.zeros(2, trained.state_size))
    return Exported(
        ExportedPolicy(trained, spaces),
        example,
        ["actions", "parameters", *([NEXT_STATE] if recurrent else [])],
        dynamic={name: {0: "batch"} for name in names},
        data=batches,
        reference=reference,
        licence=f"that of the environment {settings.env_id}, whose experience the data are",
        extra={
            "environment": settings.env_id,
            "observation_space": shown(spaces.observation),
            "action_space": shown(spaces.action),
            "distribution": type(trained.actions).__name__,
        },
    )
