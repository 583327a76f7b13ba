"""What SAC and DQN have in common: the replay buffer, the number of updates, and target networks.

Shapes: m are the samples of an optimizer step, u optimizer steps, ... an observation's own shape, A an action's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rolecall import Context, Sharded, Share
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.defaults import OffPolicy
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import PolicyState, Trajectory
from rolecall.jobs.rl.model import ActorCritic
from rolecall.jobs.rl.replay import Batch, Replay
from rolecall.jobs.rl.spaces import Spaces

BLOCK_BYTES = 2**25  # of the samples that are drawn at once


class OffPolicyLearner(Learner):
    """Has a replay buffer. A subclass makes optimizer steps."""

    choices: OffPolicy
    beside: nn.Module  # the networks that learn beside the model

    def __init__(
        self,
        model: ActorCritic,
        settings: RlSettings,
        choices: OffPolicy,
        spaces: Spaces,
        device: torch.device,
        threads: int = 1,
    ) -> None:
        super().__init__(model, settings, choices, device, threads)
        self.replay = Replay(choices.replay_size, spaces)
        self.samples = 0  # environment steps
        self._owed = 0.0  # optimizer steps, less than one
        self._begin(spaces)

    def update(self, trajectories: Sequence[Trajectory], progress: float = 0.0, longest: int = 0) -> dict[str, float]:
        """Adds the trajectories to the replay buffer, and makes UPDATES_PER_STEP optimizer steps for each of their
        steps, after the first LEARNING_STARTS.
        """
        new = sum(trajectory.samples for trajectory in trajectories)
        if not new:  # every environment only reset
            return self._logged(torch.zeros(3))
        self._normalize(trajectories)
        for trajectory in trajectories:
            self.replay.add(trajectory)
        self.samples += new
        self.version += 1
        self._explore()
        if self.samples < self.choices.learning_starts or not self.replay.has_steps:
            return self._logged(torch.zeros(3))
        self._owed += new * self.choices.updates_per_step
        count = int(self._owed)
        self._owed -= count
        sums = torch.zeros(3, device=self.device)
        flush_denormals()
        try:
            for batch in self._batches(count):
                sums += self._step(batch)
        finally:
            torch.set_flush_denormal(False)
        self.optimizer_steps += count
        return self._logged(sums / max(1, count), count * self.choices.batch_size / new)

    def _logged(self, means: Tensor, passes: float = 0.0) -> dict[str, float]:
        """The result of an update: the means [3] of what `_step` returns, and how often each new step would have been a
        sample.
        """
        names = ("rl_policy_loss", "rl_baseline_loss", "rl_policy_entropy_nats")
        beside = {"rl_update_passes": passes, "exploration": self.exploration, "replay_rows": self.replay.size}
        return {**dict(zip(names, means.tolist(), strict=True)), **beside}

    def _batches(self, count: int) -> Iterator[Batch]:
        """The samples of `count` optimizer steps, with observations as the networks take them. They are drawn for many
        steps at once, which takes less time.
        """
        size = self.choices.batch_size
        pair = 2 * self.replay.columns["observations"][0].numel() * 4  # bytes of a sample as float32
        at_once = max(1, BLOCK_BYTES // (size * pair))
        for done in range(0, count, at_once):
            steps = min(at_once, count - done)
            drawn = self.replay.sample(steps * size, self.choices.gamma, self.choices.n_step, self._random)
            batch = Batch(*(column.to(self.device) for column in drawn))
            with torch.no_grad():
                batch = batch._replace(
                    observations=self.model.prepared(batch.observations), following=self.model.prepared(batch.following)
                )
            yield from map(Batch._make, zip(*(column.split(size) for column in batch), strict=True))

    def _begin(self, spaces: Spaces) -> None:
        """Makes the networks `beside` the model and the optimizer."""
        raise NotImplementedError

    def _step(self, batch: Batch) -> Tensor:
        """Makes an optimizer step. Returns policy loss, value loss and entropy [3]."""
        raise NotImplementedError

    @property
    def exploration(self) -> float:
        """SAC's entropy coefficient, or DQN's epsilon."""
        raise NotImplementedError

    def _explore(self) -> None:
        """Sets the exploration of the policy that acts next."""
        raise NotImplementedError

    def policy_state(self) -> PolicyState:
        """A copy of the policy that acts next, on the CPU."""
        return {name: value.clone() for name, value in super().policy_state().items()}

    def shares(self, context: Context[RlSettings]) -> dict[str, Sharded]:
        """The replay buffer."""
        share = Share(context, "replay", self.replay.rows, self.replay.prepare)
        self.replay.before = share.before
        return {share.name: Sharded(context, share.name, context.me.role)}

    def state_dict(self) -> dict[str, Any]:
        """See `Learner.state_dict`."""
        draws, replay = self._random.get_state(), self.replay.state_dict()
        counted = {"samples": self.samples, "owed": self._owed, "draws": draws, "replay": replay}
        return {**super().state_dict(), **counted, "beside": self.beside.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Learner.load_state_dict`."""
        super().load_state_dict(state)
        self.samples, self._owed = state["samples"], state["owed"]
        self._random.set_state(state["draws"])
        self.replay.load_state_dict(state["replay"])
        self.beside.load_state_dict(state["beside"])


def flush_denormals() -> None:
    """Rounds denormal numbers to 0 in this thread: matrix products with them take a tenth more time."""
    torch.set_flush_denormal(True)


def first(out: Any) -> Tensor:
    """The parameters of a policy's output, which may have a value beside them."""
    parameters: Tensor = out if isinstance(out, Tensor) else out[0]
    return parameters


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, rate: float) -> None:
    """Moves the target network towards its network, by the share `rate` of the distance."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), rate)
