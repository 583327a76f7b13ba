"""The learner of policy gradients, for every kind of policy and way of inference.

PPO (Schulman et al. 2017) with the advantages of Schulman et al. 2016. The tutorial's policy gradient (Williams 1992)
is the same with a lambda of 1 and one pass over the samples.

Shapes: m are samples, u units (sequences of L samples), ... an observation's own shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.defaults import OnPolicy, discount
from rolecall.jobs.rl.distributions import StateDependent
from rolecall.jobs.rl.learner import Learner, set_gradients
from rolecall.jobs.rl.messages import Array, Done, Trajectory
from rolecall.jobs.rl.model import ActorCritic, learned_parameters
from rolecall.jobs.rl.samples import Samples, join, samples_of

CHUNK_SAMPLES = 2048  # samples in one pass: their activations fit the cache
MIN_CHUNK_VALUES = 4096  # values of observations in a chunk: below, another thread costs more than it saves
KL_TOLERANCE_FACTOR = 2.0  # the learning rate changes if the KL divergence is beyond TARGET_KL times or over this
LR_CHANGE_FACTOR = 1.5
MIN_LR, MAX_LR = 1e-5, 2e-3  # bounds of the adaptive learning rate
LR_DECAY_SHARE = 0.5  # last share of the training, in which the upper bound falls to 0
KL_STOP_FACTOR = 4.0  # times TARGET_KL: an iteration's passes end
MIN_SIGNAL = 0.005  # of the returns, or of the rewards: smaller differences are mostly the critic's errors
MAX_FALL_STEPS = 128  # mean steps to the first terminations of a task in which something falls
SHORT_ROLLOUTS = 4  # as long as all rewards are alike, rollouts have the steps of the defaults over this
VALUE_COEF = 0.5  # of the value loss: PPO's usual half
RETURN_STATISTICS_DECAY = 0.95  # of the mean and variance that normalise values
MAX_GRAD_NORM = 0.5  # global norm that gradients are clipped to


# the parts of the loss, which are logged as means over an update's optimizer steps
PARTS = ("rl_policy_loss", "rl_baseline_loss", "rl_policy_entropy_nats", "rl_kl_nats", "rl_clipped_ratio")


class Ppo(Learner):
    """See the file's docstring. `threads` threads compute chunks in parallel. They synchronise once a step, unlike
    torch's own threads, which synchronise after every operation and are slow on a busy machine.
    """

    choices: OnPolicy

    def __init__(
        self, model: ActorCritic, settings: RlSettings, choices: OnPolicy, device: torch.device, threads: int = 1
    ) -> None:
        super().__init__(model, settings, choices, device, threads)
        self._parameters = learned_parameters(model)
        self.optimizer = torch.optim.Adam(self._parameters, lr=choices.lr, eps=1e-5, fused=True)
        self._map: Callable[..., Iterable[Any]] = ThreadPoolExecutor(threads).map if threads > 1 else map
        self._mean, self._square = 0.0, 1.0
        self._gamma, self._found = 0.0, False  # whether rewards or ends have differed yet
        self._rewards = math.inf, -math.inf  # the smallest and the largest yet
        # samples so far; None if an episode has terminated, or if EXPLORATION is given
        self._unended: int | None = 0 if settings.exploration is None else None
        self._target_kl, self._max_rate = choices.target_kl, max(MAX_LR, choices.lr)

    @property
    def rollout_steps(self) -> int:
        """See `Learner.rollout_steps`. As long as all rewards are alike, returns differ only by when episodes end, with
        little noise, or not at all, and each update is another policy that may find a reward: short rollouts do best.
        """
        steps, (lowest, highest) = self.choices.rollout_steps, self._rewards
        if self.settings.rollout_steps is None and self.choices.target_kl and lowest >= highest:
            return max(1, steps // SHORT_ROLLOUTS)
        return steps

    def update(self, trajectories: Sequence[Trajectory], progress: float = 0.0, longest: int = 0) -> dict[str, float]:
        """Makes the update of an iteration: EPOCHS passes of MINIBATCHES optimizer steps, fewer if the policy diverges
        or the advantages are noise.

        `progress` bounds the adaptive learning rate. The discount depends on it and on `longest` unless GAMMA is given.
        """
        self._gamma = discount(progress, longest) if self.choices.gamma is None else self.choices.gamma
        self._normalize(trajectories)
        with torch.no_grad():
            gamma, decay = self._gamma, self.choices.gae_lambda
            samples = join([samples_of(each, self._values, gamma, decay, self.device) for each in trajectories])
        used = samples.used
        if not used.any():  # every environment only reset: nothing to learn
            return _logged(torch.zeros(len(PARTS)))
        explained = _explained(samples.returns[used], samples.values[used])
        advantages = samples.returns - samples.values
        deviation, mean = torch.std_mean(advantages[used], unbiased=False)
        rewards = np.concatenate([trajectory.rewards[trajectory.experience] for trajectory in trajectories])
        self._rewards = min(self._rewards[0], float(rewards.min())), max(self._rewards[1], float(rewards.max()))
        informed = self._informed(float(deviation), samples.returns[used], rewards)
        self._target_kl = self.choices.target_kl * informed
        self._normalise(samples.returns[used])
        samples.values = (advantages - mean) / (deviation + 1e-8)  # from here on, the advantages of the loss
        samples.returns = (samples.returns - self._mean) / self._scale
        self._max_rate = max(MAX_LR, self.choices.lr) * min(1.0, (1 - progress) / LR_DECAY_SHARE)
        if self._narrows_noise(trajectories):  # the samples are those of another policy
            self.version += 1
            return _logged(torch.zeros(len(PARTS)), explained)
        sums, steps = self._passes(samples, max(1, math.ceil(self.choices.epochs * informed)))
        self.version += 1
        self.optimizer_steps += steps
        return _logged(sums / max(steps, 1), explained, steps / self._minibatches(samples))

    def _narrows_noise(self, trajectories: Sequence[Trajectory]) -> bool:
        """Decides, when the first episodes terminate, whether the noise of gSDE stays held, and narrows it if not.

        If episodes are short, something falls, and noise that pushes to one side for a whole episode makes it fall
        whatever the policy does.
        """
        actions = self.model.actions
        if self._unended is None or not isinstance(actions, StateDependent):
            return False
        self._unended += sum(trajectory.samples for trajectory in trajectories)
        ends = sum(int((trajectory.dones == Done.TERMINATED).sum()) for trajectory in trajectories)
        if not ends:
            return False
        falls = self._unended <= ends * MAX_FALL_STEPS
        self._unended = None
        if falls:
            chosen = [trajectory.actions[trajectory.experience] for trajectory in trajectories]
            actions.release(float(np.concatenate(chosen).std()))
        return falls

    def _informed(self, deviation: float, returns: Tensor, rewards: Array) -> float:
        """How much of the advantages, with this standard deviation, is more than the critic's errors: 0 to 1.

        Normalised errors weigh as much as a signal, and would move a policy that cannot improve by TARGET_KL. Before
        the first signal they may: nothing is lost, and another policy may find rewards.
        """
        signal = max(
            deviation / (MIN_SIGNAL * float(returns.square().mean().sqrt()) + 1e-8),
            float(rewards.std()) / (MIN_SIGNAL * float(np.sqrt(np.square(rewards).mean())) + 1e-8),
        )
        self._found = self._found or signal >= 1.0
        return min(1.0, signal**2) if self.choices.target_kl and self._found else 1.0

    def _passes(self, samples: Samples, count: int) -> tuple[Tensor, int]:
        """The optimizer steps of `count` passes. Returns the sums of `_loss`'s parts [5], and the number of steps."""
        self.model.train()
        sums, steps = torch.zeros(5, device=self.device), 0
        minibatches = self._minibatches(samples)
        bounds = [len(samples) * place // minibatches for place in range(minibatches + 1)]
        drift = 0.0  # KL divergence from the policy that acted before the first step: with PIPELINE, of the last update
        for _ in range(count):
            shuffled = samples[torch.randperm(len(samples), generator=self._random).to(self.device)]
            parts = sums
            for start, stop in itertools.pairwise(bounds):
                parts = self._gradient(shuffled[start:stop])
                drift = drift if steps else float(parts[3])
                nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
                self.optimizer.step()
                sums += parts
                steps += 1
            if self._is_too_far(float(parts[3]) - drift):
                break
        self.model.eval()
        return sums, steps

    def _is_too_far(self, kl: float) -> bool:
        """Whether the passes end after one whose last minibatch diverged by `kl`. Adapts the learning rate."""
        target, rate = self._target_kl, self.rate
        if not self.choices.target_kl:
            return False
        if kl > target * KL_TOLERANCE_FACTOR:  # Schulman et al. 2017 adapt a penalty in this way
            rate /= LR_CHANGE_FACTOR
        elif kl < target / KL_TOLERANCE_FACTOR:
            rate *= LR_CHANGE_FACTOR
        self._set_rate(min(max(rate, min(MIN_LR, self.choices.lr)), self._max_rate))
        return kl > target * KL_STOP_FACTOR

    def _minibatches(self, samples: Samples) -> int:
        return min(self.choices.minibatches, len(samples))

    def _values(self, observations: Tensor, states: Tensor, ends: Tensor) -> Tensor:
        """The returns [u, L] that the model expects; not normalised."""

        def values(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            rows, before, ended = part
            with torch.no_grad():
                if not self.model.state_size:
                    return self.model.value(rows.squeeze(1))[:, None]
                return self.model.unroll(rows.transpose(0, 1), before, ended.T)[1].T

        size = self._chunk(observations, len(observations))
        parts = zip(observations.split(size), states.split(size), ends.split(size), strict=True)
        return torch.cat(list(self._map(values, parts))) * self._scale + self._mean

    def _chunk(self, observations: Tensor, count: int) -> int:
        """Units in one forward pass of a thread, for `count` units in total."""
        least = max(1, MIN_CHUNK_VALUES * len(observations) // observations.numel())
        return max(1, min(CHUNK_SAMPLES // observations.shape[1] or 1, max(least, -(-count // self.threads))))

    def _gradient(self, part: Samples) -> Tensor:
        """Sets the gradients of the loss over a minibatch. Returns the parts [5] of `_loss`."""
        size, count = self._chunk(part.observations, len(part)), float(part.used.sum())
        if size >= len(part):
            gradients, parts = self._loss(part, count)
            set_gradients(self._parameters, gradients)
            return parts
        pieces = [part[start : start + size] for start in range(0, len(part), size)]
        losses = list(self._map(lambda piece: self._loss(piece, count), pieces))
        for parameter, *several in zip(self._parameters, *(gradients for gradients, _ in losses), strict=True):
            present = [gradient for gradient in several if gradient is not None]
            parameter.grad = torch.stack(present).sum(0) if present else None
        return torch.stack([parts for _, parts in losses]).sum(0)

    def _loss(self, part: Samples, count: float) -> tuple[Sequence[Tensor | None], Tensor]:
        """The gradients of the loss and its parts [5]: policy loss, value loss, entropy, KL divergence and clipped
        samples. Each is the sum over the samples of `part`, divided by `count`.
        """

        def kept(column: Tensor) -> Tensor:
            """The experience [m, ...] of a column [u, L, ...]."""
            return column[part.used] if self.model.state_size else column.squeeze(1)  # all is used

        unrolled, values = self.model.unroll(part.observations.transpose(0, 1), part.states, part.ends.T)
        parameters, values, actions = kept(unrolled.transpose(0, 1)), kept(values.T), kept(part.actions)
        advantages, returns, before = map(kept, (part.values, part.returns, part.log_probabilities))
        difference = self.model.actions.log_probability(parameters, actions) - before
        ratio = difference.exp()
        clip_ratio = self.choices.clip_ratio
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).sum() / count
        value_loss = nn.functional.smooth_l1_loss(values, returns, reduction="sum") / count
        loss = policy_loss + VALUE_COEF * value_loss
        if self.choices.entropy_coef:
            entropy = self.model.actions.entropy(parameters).sum() / count
            loss = loss - self.choices.entropy_coef * entropy
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            entropy = self.model.actions.entropy(parameters).sum() / count
            kl = (ratio - 1 - difference).sum() / count  # Schulman's estimate: never negative, small variance
            beyond = (ratio != clipped).sum() / count
            return gradients, torch.stack((policy_loss, value_loss, entropy, kl, beyond)).detach()

    def _normalise(self, returns: Tensor) -> None:
        """Adds the returns [m] to the mean and variance that normalise values, and rescales the value layer, so that
        the value of each observation stays the same (PopArt; van Hasselt et al. 2016).
        """
        mean, scale = self._mean, self._scale
        decay = RETURN_STATISTICS_DECAY if self.version else 0.0
        self._mean = decay * self._mean + (1 - decay) * float(returns.mean())
        self._square = decay * self._square + (1 - decay) * float(returns.square().mean())
        layer = self.model.value_layer
        if layer is not None and self.version:
            with torch.no_grad():
                layer.weight *= scale / self._scale
                layer.bias.mul_(scale / self._scale).add_((mean - self._mean) / self._scale)

    @property
    def _scale(self) -> float:
        return float(max(self._square - self._mean**2, 1e-6) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """See `Learner.state_dict`."""
        return {
            **super().state_dict(),
            "mean": self._mean,
            "square": self._square,
            "shuffle": self._random.get_state(),
            "found": self._found,
            "rewards": self._rewards,
            "unended": self._unended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`; with TARGET_KL, at its learning rate."""
        super().load_state_dict(state)
        if self.choices.target_kl:
            self._set_rate(state["optimizer"]["param_groups"][0]["lr"])
        self._mean, self._square = state["mean"], state["square"]
        self._random.set_state(state["shuffle"])
        # an earlier version's checkpoint lacks these
        self._found = state.get("found", True)
        self._rewards = state.get("rewards", (0.0, 1.0))
        if self.settings.exploration is None:
            self._unended = state.get("unended")


def _logged(means: Tensor, explained: float = 0.0, passes: float = 0.0) -> dict[str, float]:
    """The result of an update: the means of PARTS, the share of the variance of the returns that the values explain,
    and the number of optimizer steps over that of one pass.
    """
    parts = dict(zip(PARTS, means.tolist(), strict=True))
    return {**parts, "rl_explained_variance_ratio": explained, "rl_update_passes": passes}


def _explained(returns: Tensor, values: Tensor) -> float:
    """The share of the variance of the returns [m] that the values [m] explain; 0 if the returns do not vary."""
    variance = float(returns.var(unbiased=False))
    return 1 - float((returns - values).var(unbiased=False)) / variance if variance > np.finfo(np.float32).tiny else 0.0
