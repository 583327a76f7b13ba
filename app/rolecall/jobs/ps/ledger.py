"""The ledger: which samples of an epoch are used, who computes which, and when an update closes. Pure logic.

Every sample counts once an epoch: it is handed out, and it is marked as used together with the update that has its
gradient. What a trainer has in hand when it is lost is handed out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rolecall.jobs.ps.messages import GradientKey, Indices


@dataclass(frozen=True)
class Update:
    """What the servers do next: apply the mean of the gradients in `weights` (adding up to 1; none: nothing changes) at
    `rate` times the learning rate, then answer those in `batches` with parameters and with these batches.
    """

    weights: dict[GradientKey, float]
    rate: float
    batches: dict[GradientKey, list[Indices]]


@dataclass
class _Trainer:
    """`batches` are in hand, their gradients not yet used; a batch has the number of the gradient that will be computed
    from it, and gradients may overtake each other. `waiting` are those whose answers are due, `sent` counts those of
    the open update, `assigned` all batches so far.
    """

    batches: dict[int, Indices] = field(default_factory=dict)
    assigned: int = 0
    waiting: list[GradientKey] = field(default_factory=list)
    sent: int = 0
    ready: bool = False


class Ledger:
    """Hands out `samples` samples in batches of at most `batch`, in an order given by `seed` and the epoch.

    `sync` says whether an update waits for all trainers, or each gradient is one; `ahead` is how many batches a trainer
    has in hand at once. After `epochs` it is over.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        epochs: int,
        seed: int,
        trainers: Iterable[str],
        sync: bool,
        ahead: int = 1,
        max_staleness: int = 0,
    ) -> None:
        self.samples, self.batch, self.epochs, self.seed = samples, batch, epochs, seed
        self.sync, self.ahead, self.max_staleness = sync, ahead, max_staleness
        self.version = self.epoch = 0
        self.refused = 0
        self._trainers = {name: _Trainer() for name in trainers}
        self._gradients: dict[GradientKey, int] = {}  # of the open update, with their samples
        self._rate = 1.0
        self._begin_epoch(np.zeros(samples, bool))

    # ---- questions

    @property
    def over(self) -> bool:
        """Whether all epochs are done."""
        return self.epoch >= self.epochs

    @property
    def trainers(self) -> list[str]:
        """Those that are not lost."""
        return list(self._trainers)

    @property
    def used(self) -> int:
        """Samples of this epoch that an update has used."""
        return int(self._used.sum())

    @property
    def done(self) -> int:
        """Samples that updates have used, over all epochs."""
        return self.epoch * self.samples + (0 if self.over else self.used)

    def late(self) -> list[str]:
        """Those who have a batch in hand whose gradient has not come, or who have not reported ready."""
        return [
            name for name, trainer in self._trainers.items() if not trainer.ready or len(trainer.batches) > trainer.sent
        ]

    def is_ready(self, name: str) -> bool:
        """Whether the trainer `name` has reported ready, or sent a gradient."""
        return self._trainers[name].ready

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how far the training data is used."""
        used = torch.from_numpy(np.packbits(self._used))
        return {"epoch": self.epoch, "version": self.version, "used": used, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it is of other data."""
        if state["samples"] != self.samples:
            raise ValueError(f"the checkpoint is of {state['samples']} training samples; DATASET has {self.samples}")
        self.epoch, self.version = state["epoch"], state["version"]
        self._begin_epoch(np.unpackbits(state["used"].numpy(), count=self.samples).astype(bool))
        self._advance_epoch()

    # ---- events

    def take(self, key: GradientKey, version: int, samples: int) -> Update | None:
        """A gradient of `samples` samples has arrived, whole, computed with the parameters after update `version`; with
        one of no samples a trainer reports that it is ready. Returns the update that is due, if one is.
        """
        trainer = self._trainers.get(key.trainer)
        if trainer is None:
            return None  # it was lost meanwhile
        trainer.ready = True
        trainer.waiting.append(key)
        staleness = 0 if self.sync else self.version - version
        if samples and staleness > self.max_staleness:
            self.refused += 1
            self._return(trainer.batches.pop(key.number))
        elif samples:
            self._gradients[key] = samples
            trainer.sent += 1
            # staleness-aware asynchronous SGD (Zhang et al. 2016): without it, momentum and staleness together diverge
            self._rate = 1 / max(1, staleness)
        return self._close()

    def lose(self, name: str) -> Update | None:
        """A trainer is lost: the open update closes without it, and its batches are handed out again."""
        trainer = self._trainers.pop(name, None)
        if trainer is None:
            return None
        self._gradients = {key: samples for key, samples in self._gradients.items() if key.trainer != name}
        for _, batch in sorted(trainer.batches.items(), reverse=True):
            self._return(batch)
        return self._close()

    # ---- how

    def _close(self) -> Update | None:
        """Closes the open update, unless it waits for a trainer. None where nothing changes and nobody is answered."""
        if self.sync and self.late():
            return None
        total = sum(self._gradients.values())
        weights = {key: samples / total for key, samples in self._gradients.items()}
        for key in weights:
            trainer = self._trainers[key.trainer]
            self._used[trainer.batches.pop(key.number)] = True
            trainer.sent -= 1
        self.version += bool(weights)
        self._gradients = {}
        self._advance_epoch()
        batches = self._hand_out()
        if not weights and not batches:
            return None
        return Update(weights, self._rate, batches)

    def _advance_epoch(self) -> None:
        """Begins the next epoch where this one is used up."""
        if self._used.all() and not self.over:
            self.epoch += 1
            self._begin_epoch(np.zeros(self.samples, bool))

    def _begin_epoch(self, used: npt.NDArray[np.bool_]) -> None:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        self._used = used
        self._left = deque[int](order[~used[order]].tolist())

    def _return(self, batch: Indices) -> None:
        self._left.extendleft(reversed(batch.tolist()))

    def _hand_out(self) -> dict[GradientKey, list[Indices]]:
        """Batches for the trainers that wait, by gradient to answer. Who gets none, and has none in hand, waits on."""
        answers: dict[GradientKey, list[Indices]] = {}
        waiting = [trainer for trainer in self._trainers.values() if trainer.waiting]
        for place, trainer in enumerate(waiting):
            batches: list[Indices] = []
            while self._left and len(trainer.batches) < self.ahead and not self.over:
                # all share the end of an epoch where they wait for each other
                share = -(-len(self._left) // (len(waiting) - place)) if self.sync else self.batch
                size = min(self.batch, share, len(self._left))
                batches.append(np.array([self._left.popleft() for _ in range(size)], np.int64))
                trainer.assigned += 1
                trainer.batches[trainer.assigned] = batches[-1]
            if trainer.batches or self.over:  # nothing more to do is an answer too
                answers |= {key: [] for key in trainer.waiting}
                answers[trainer.waiting[0]] = batches
                trainer.waiting.clear()
        return answers
