"""Messages between the ranks.

Shapes: T are the steps of a rollout, n the environments of a group, ... an observation's own shape, A an action's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
SEQUENCE_STEPS = 16  # steps through which gradients flow back in a recurrent policy
PolicyState = dict[str, Tensor]  # parameters and buffers of a policy by name


class Done:
    """Whether and how a step ends its episode. Arrays called `dones` hold these codes as uint8."""

    # not an enum, whose members numpy takes microseconds to convert at every step
    CONTINUES = 0
    TERMINATED = 1
    TRUNCATED = 2


@dataclass(frozen=True)
class Trajectory:
    """A rollout of one group of environments under the policy of `version`.

    observations [T+1, n, ...]; actions [T, n, A] as the policy samples them (int64 counted from 0, or float32);
    log_probabilities [T, n] float32 of the actions when they were sampled; rewards [T, n] float32; dones [T, n] uint8;
    experience [T, n] bool, False for the step after the end of an episode, which only resets; states [s, n, S] float32
    of a recurrent policy at steps 0, SEQUENCE_STEPS, ... up to T, with S = 0 for other policies.
    """

    observations: Array
    actions: Array
    log_probabilities: Array
    rewards: Array
    dones: Array
    experience: Array
    states: Array
    version: int

    @property
    def samples(self) -> int:
        """The number of environment steps that are experience."""
        return int(self.experience.sum())


class Episode(NamedTuple):
    """A completed episode: the sum of its rewards, and its steps."""

    total: float
    length: int


@dataclass(frozen=True)
class Rollout:
    """The answer of an observer: the episodes that ended, and the trajectories of its groups. With INFERENCE=agent
    there are no trajectories, because the agent records them.
    """

    episodes: list[Episode]
    trajectories: list[Trajectory]
