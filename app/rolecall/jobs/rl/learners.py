"""The learners: ppo.py learns from an iteration's samples, sac.py and dqn.py from a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rolecall import Context, Sharded
from rolecall.jobs.rl import RlSettings, model
from rolecall.jobs.rl.defaults import OffPolicy, OnPolicy
from rolecall.jobs.rl.dqn import Dqn
from rolecall.jobs.rl.messages import PolicyState, Trajectory
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.sac import Sac
from rolecall.jobs.rl.spaces import Spaces


class Update(Protocol):
    """The result of an iteration's update."""

    def gauges(self) -> dict[str, float]:
        """The values to log, by the names of metrics."""
        ...


class Learner(Protocol):
    """Holds the model and its optimizer. Its state, with that of its shares, is what training continues from."""

    @property
    def version(self) -> int:
        """The number of updates before."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps made."""
        ...

    @property
    def rollout_steps(self) -> int:
        """The steps of each environment in the next rollouts."""
        ...

    def update(self, trajectories: Sequence[Trajectory], progress: float = 0.0, longest: int = 0) -> Update:
        """Learns from the trajectories of an iteration; `progress` is the completed share of the training, 0 to 1, and
        `longest` the steps that an episode may have, on which a discount that grows depends.
        """
        ...

    def policy_state(self) -> PolicyState:
        """The policy that acts next, on the CPU. The tensors may be those of the model."""
        ...

    def shares(self, context: Context[RlSettings]) -> dict[str, Sharded]:
        """The parts of the state that are too large for `state_dict`, as `Context.restore` takes them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state from which training continues exactly."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        ...


def make(
    settings: RlSettings, spaces: Spaces, choices: OnPolicy | OffPolicy, device: torch.device, threads: int = 1
) -> Learner:
    """The learner of ALGORITHM, which computes with `threads` threads. Raises UsageError as `model.build` does."""
    built = model.build(settings, spaces, choices)
    if isinstance(choices, OnPolicy):
        return Ppo(built, settings, choices, device, threads)
    kind = Sac if settings.algorithm == "sac" else Dqn
    return kind(built, settings, choices, spaces=spaces, device=device, threads=threads)
