"""The ledger: which samples of an epoch are used, who computes which, and when an update closes. Pure logic.

Every sample counts once an epoch: it is handed out, and it is marked as used together with the update that has its
gradient. What a trainer takes with it when it goes is handed out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Gradient:
    """A trainer's gradient, of `samples` samples, computed with the parameters after update `version`. The first of
    each generation has no samples: with it a trainer says that it is there.
    """

    trainer: str
    stage: int
    version: int
    samples: int


@dataclass(frozen=True)
class Update:
    """What the servers do next, in the order of `number`: apply the mean of the gradients in `weights` (by trainer and
    stage, adding up to 1; none: nothing changes) at `rate` times the learning rate, then send parameters to those in
    `answers`, with new batches.
    """

    number: int
    weights: dict[tuple[str, int], float]
    rate: float
    answers: dict[tuple[str, int], list[Indices]]


@dataclass
class _Trainer:
    """`batches` are handed out, and their gradients not yet used; a batch has the number of the gradient that will be
    made of it; gradients may overtake each other. `waiting` are those whose answers are due, `sent` counts those of the
    update that is open.
    """

    batches: dict[int, Indices] = field(default_factory=dict)
    given: int = 0
    waiting: list[int] = field(default_factory=list)
    sent: int = 0
    here: bool = False


class Ledger:
    """Hands out `samples` samples in batches of at most `batch`, in an order given by `seed` and the epoch.

    `wait` says whether an update waits for all trainers (sync) or each gradient is one; `ahead` is how many batches a
    trainer has in hand at once. After `epochs` it is over.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        epochs: int,
        seed: int,
        trainers: Iterable[str],
        wait: bool,
        ahead: int = 1,
        max_staleness: int = 0,
    ) -> None:
        self.samples, self.batch, self.epochs, self.seed = samples, batch, epochs, seed
        self.wait, self.ahead, self.max_staleness = wait, ahead, max_staleness
        self.version = self.epoch = 0
        self.refused = 0
        self._number = 0
        self._trainers = {name: _Trainer() for name in trainers}
        self._gradients: list[Gradient] = []  # of the update that is still open
        self._rate = 1.0
        self._begin(np.zeros(samples, bool))

    # ---- questions

    @property
    def over(self) -> bool:
        return self.epoch >= self.epochs

    @property
    def trainers(self) -> list[str]:
        """Who has not been lost."""
        return list(self._trainers)

    @property
    def used(self) -> int:
        """Samples of this epoch that an update has used."""
        return int(self._used.sum())

    def late(self) -> list[str]:
        """Who has a batch in hand whose gradient has not come, or was not heard from at all."""
        return [
            name for name, trainer in self._trainers.items() if not trainer.here or len(trainer.batches) > trainer.sent
        ]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: how far the training data is used."""
        used = torch.from_numpy(np.packbits(self._used))
        return {"epoch": self.epoch, "version": self.version, "used": used, "samples": self.samples}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises ValueError where it is of other data."""
        if state["samples"] != self.samples:
            raise ValueError(f"the checkpoint is of {state['samples']} training samples; DATASET has {self.samples}")
        self.epoch, self.version = state["epoch"], state["version"]
        self._begin(np.unpackbits(state["used"].numpy(), count=self.samples).astype(bool))
        self._turn()

    # ---- events

    def take(self, gradient: Gradient) -> Update | None:
        """A trainer's gradient has arrived, whole. Returns the update that is due, if one is."""
        trainer = self._trainers.get(gradient.trainer)
        if trainer is None:
            return None  # it was lost meanwhile
        trainer.here = True
        trainer.waiting.append(gradient.stage)
        staleness = 0 if self.wait else self.version - gradient.version
        if gradient.samples and staleness > self.max_staleness:
            self.refused += 1
            self._back(trainer.batches.pop(gradient.stage))
        elif gradient.samples:
            self._gradients.append(gradient)
            trainer.sent += 1
            # staleness-aware asynchronous SGD (Zhang et al. 2016): without it, momentum and staleness together diverge
            self._rate = 1 / max(1, staleness)
        return self._close()

    def lose(self, name: str) -> Update | None:
        """A trainer is gone: the open update closes without it, and its batches are handed out again."""
        trainer = self._trainers.pop(name, None)
        if trainer is None:
            return None
        self._gradients = [gradient for gradient in self._gradients if gradient.trainer != name]
        for _, batch in sorted(trainer.batches.items(), reverse=True):
            self._back(batch)
        return self._close()

    # ---- how

    def _close(self) -> Update | None:
        if self.wait and self.late():
            return None
        total = sum(gradient.samples for gradient in self._gradients)
        weights = {(gradient.trainer, gradient.stage): gradient.samples / total for gradient in self._gradients}
        for gradient in self._gradients:
            trainer = self._trainers[gradient.trainer]
            self._used[trainer.batches.pop(gradient.stage)] = True
            trainer.sent -= 1
        self.version += bool(weights)
        self._gradients = []
        self._turn()
        answers = self._hand_out()
        if not weights and not answers:
            return None
        self._number += 1
        return Update(self._number, weights, self._rate, answers)

    def _turn(self) -> None:
        """Begin the next epoch where this one is used up."""
        if self._used.all() and not self.over:
            self.epoch += 1
            self._begin(np.zeros(self.samples, bool))

    def _begin(self, used: npt.NDArray[np.bool_]) -> None:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        self._used = used
        self._left = deque[int](order[~used[order]].tolist())

    def _back(self, batch: Indices) -> None:
        self._left.extendleft(reversed(batch.tolist()))

    def _hand_out(self) -> dict[tuple[str, int], list[Indices]]:
        """Batches for those who wait, and so their answers. Who gets none, and has none in hand, waits on."""
        answers: dict[tuple[str, int], list[Indices]] = {}
        if self.over:  # nothing more to do, which is an answer too
            for name, trainer in self._trainers.items():
                answers |= {(name, stage): [] for stage in trainer.waiting}
                trainer.waiting.clear()
            return answers
        hungry = [(name, trainer) for name, trainer in self._trainers.items() if trainer.waiting]
        for place, (name, trainer) in enumerate(hungry):
            given = []
            while self._left and len(trainer.batches) < self.ahead:
                # all share the end of an epoch where they wait for each other
                share = -(-len(self._left) // (len(hungry) - place)) if self.wait else self.batch
                size = min(self.batch, share, len(self._left))
                given.append(np.array([self._left.popleft() for _ in range(size)], np.int64))
                trainer.given += 1
                trainer.batches[trainer.given] = given[-1]
            if trainer.batches:
                answers |= {(name, stage): [] for stage in trainer.waiting}
                answers[name, trainer.waiting[0]] = given
                trainer.waiting.clear()
        return answers
