"""The replay buffer: a ring of the newest steps, from which samples are drawn uniformly.

Shapes: r are the rows of the buffer, m samples, ... an observation's own shape, A an action's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rolecall import Rows, UsageError
from rolecall.jobs.rl.messages import Array, Done, Trajectory
from rolecall.jobs.rl.spaces import Spaces
from rolecall.jobs.support import free_memory

# in the column `ends`, beside the codes of Done: the row is no step, it has the observation after the step before
NO_STEP = 3


class Batch(NamedTuple):
    """Samples: observations [m, ...], actions [m, A], the discounted rewards [m] of the next steps, and the
    observations [m, ...] after them, whose values count times `discounts` [m], which is 0 after a termination.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    following: Tensor
    discounts: Tensor


class Replay:
    """The newest `capacity` rows. Those of an environment's rollout are adjacent: a row for each step and a last one
    for the observation after it, so that no observation is stored twice, and a step's successor is the next row.

    `before(begin, end)` is called before the rows `begin` to `end` change. Raises UsageError if the buffer does not fit
    in the memory that is free.
    """

    def __init__(self, capacity: int, spaces: Spaces) -> None:
        space = spaces.observation
        image = space.dtype == np.uint8
        row = math.prod(space.shape) * (1 if image else 4) + 5
        row += math.prod(spaces.action_shape) * np.dtype(spaces.action_dtype).itemsize
        free = free_memory()
        if capacity * row > free:
            raise UsageError(
                f"REPLAY_SIZE={capacity}: the replay buffer takes {capacity * row / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free for this rank; lower REPLAY_SIZE"
            )
        actions = torch.from_numpy(np.zeros(0, spaces.action_dtype)).dtype
        # columns [r, ...]; memory of zeros is taken as it is written
        self.columns = {
            "observations": torch.zeros((capacity, *space.shape), dtype=torch.uint8 if image else torch.float32),
            "actions": torch.zeros((capacity, *spaces.action_shape), dtype=actions),
            "rewards": torch.zeros(capacity),
            "ends": torch.full((capacity,), NO_STEP, dtype=torch.uint8),
        }
        self.capacity, self.size, self.position = capacity, 0, 0
        self.before: Callable[[int, int], None] = lambda begin, end: None

    @property
    def has_steps(self) -> bool:
        """Whether there is a step to sample."""
        return bool((self.columns["ends"] != NO_STEP).any())

    def add(self, trajectory: Trajectory) -> None:
        """Adds the rollout of each environment, in place of the oldest rows."""
        steps, n = trajectory.rewards.shape

        def rows(column: Array, fill: Any = 0) -> Array:
            """A column [up to T+1, n, ...] as [n * (T+1), ...]."""
            padded = np.full((steps + 1, *column.shape[1:]), fill, column.dtype)
            padded[: len(column)] = column
            return padded.swapaxes(0, 1).reshape(n * (steps + 1), *column.shape[2:])

        ends = np.where(trajectory.experience, trajectory.dones, np.uint8(NO_STEP))
        columns = {
            "observations": rows(trajectory.observations),
            "actions": rows(trajectory.actions),
            "rewards": rows(trajectory.rewards),
            "ends": rows(ends, NO_STEP),
        }
        start, total = max(0, n * (steps + 1) - self.capacity), n * (steps + 1)
        while start < total:
            count = min(total - start, self.capacity - self.position)
            self.before(self.position, self.position + count)
            for name, column in self.columns.items():
                column.numpy()[self.position : self.position + count] = columns[name][start : start + count]
            start += count
            self.position = (self.position + count) % self.capacity
            self.size = min(self.capacity, max(self.size, self.position or self.capacity))

    def sample(self, count: int, gamma: float, n_step: int, generator: torch.Generator) -> Batch:
        """`count` samples with replacement, each step as likely as another; there must be one. A return has the
        rewards of up to `n_step` steps, fewer at the end of an episode or of a rollout.
        """
        observations, actions, paid, dones = self.columns.values()
        rows = torch.randint(self.size, (count,), generator=generator)
        while len(missing := (dones[rows] == NO_STEP).nonzero()[:, 0]):
            rows[missing] = torch.randint(self.size, (len(missing),), generator=generator)
        rewards, ends, following = paid[rows], dones[rows], (rows + 1) % self.capacity
        discounts = gamma * (ends != Done.TERMINATED)
        for _ in range(n_step - 1):
            (going,) = ((ends == Done.CONTINUES) & (dones[following] != NO_STEP)).nonzero(as_tuple=True)
            if not len(going):
                break
            at = following[going]
            ends = torch.full_like(ends, NO_STEP).index_copy_(0, going, dones[at])
            rewards[going] += discounts[going] * paid[at]
            discounts[going] *= gamma * (ends[going] != Done.TERMINATED)
            following[going] = (at + 1) % self.capacity
        return Batch(observations[rows], actions[rows], rewards, observations[following], discounts)

    def rows(self) -> dict[str, Rows]:
        """The rows that are used, as a `Share` takes them."""
        return {name: Rows((column[: self.size],), self.size) for name, column in self.columns.items()}

    def prepare(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Rows]:
        """The rows to fill from a checkpoint with columns of these `shapes`. Raises UsageError if they do not fit."""
        for name, (count, *shape) in shapes.items():
            if count > self.capacity or (count, *shape) != (count, *self.columns[name].shape[1:]):
                raise UsageError(
                    f"the checkpoint's replay buffer has {name} {(count, *shape)}, this one has room for "
                    f"{tuple(self.columns[name].shape)}; set the REPLAY_SIZE and ENV_ID that the job was trained with, "
                    "or another CHECKPOINT_DIR"
                )
        return {name: Rows((self.columns[name][:count],), count) for name, (count, *_) in shapes.items()}

    def state_dict(self) -> dict[str, int]:
        """The state beside the columns."""
        return {"size": self.size, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a `state_dict`, once the columns have their values."""
        self.size, self.position = state["size"], state["position"]
