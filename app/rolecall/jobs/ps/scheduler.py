"""Which trainer computes which samples, and when an update closes. Pure logic.

Every sample counts once an epoch: the scheduler hands it out, and marks it as used together with the update that has
its gradient. The batches of a lost trainer are handed out again. A trainer that joins gets batches once it is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rolecall.jobs.ps.messages import GradientKey, Indices, TrainerId


@dataclass(frozen=True)
class DueUpdate:
    """The servers' next update: the mean of the gradients in `weights` (which add up to 1; empty: nothing changes) at
    `rate` times the learning rate. The answers to the keys of `batches` carry parameters and these batches.
    """

    weights: dict[GradientKey, float]
    rate: float
    batches: dict[GradientKey, list[Indices]]


@dataclass
class _Trainer:
    """`batches` are assigned and not yet used, as `SampleTickets`, by the number of the gradient that will be computed
    from each; gradients may overtake each other. `assigned` counts all batches so far. `waiting` are gradients without
    an answer. `sent` counts the gradients of the trainer that the open update has; `joined` says that no update waits
    until it is `ready`.
    """

    batches: dict[int, Indices] = field(default_factory=dict)
    assigned: int = 0
    waiting: list[GradientKey] = field(default_factory=list)
    sent: int = 0
    ready: bool = False
    joined: bool = False


class BatchScheduler:
    """Hands out `samples` samples in batches of at most `batch`, in an order given by `seed` and the epoch.

    With `shares`, an update is of so many batches, fewer at the end of an epoch, whoever computes them: what an update
    consists of, and in which order, does not depend on which trainers there are. A trainer computes several if there
    are more batches than trainers; if there are fewer, trainers take turns. Without `shares`, a trainer that comes or
    goes changes the number of batches. With `sync` an update waits for all trainers; otherwise each gradient is an
    update. A trainer has up to `ahead`
    batches at once; without `sync` that may change meanwhile. With `sync` and `ahead` 2, the second batch may be of the
    next epoch. After `epochs` it is over.

    A gradient may be of fewer samples than its batch; the rest is handed out again. Batches are multiples of `grain`
    samples as far as possible: the steps of a trainer.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        epochs: int,
        seed: int,
        trainers: Iterable[TrainerId],
        *,
        sync: bool,
        shares: int = 0,
        ahead: int = 1,
        max_staleness: int = 0,
        grain: int = 1,
    ) -> None:
        self.samples, self.batch, self.grain = samples, batch, grain
        self.sync, self.shares, self.ahead, self.max_staleness = sync, shares, ahead, max_staleness
        self.version = 0
        self.refused = 0  # gradients that were too stale
        self._trainers = {name: _Trainer() for name in trainers}
        self._gradients: dict[GradientKey, int] = {}  # of the open update, with their samples
        self._open: list[Indices] = []  # batches of the open update that no trainer has (shares)
        self._places: dict[int, int] = {}  # of all its batches, by the first ticket (shares)
        self._samples = SampleTickets(samples, epochs, seed, early=sync and ahead > 1)

    # ---- questions

    @property
    def over(self) -> bool:
        """Whether all epochs are done."""
        return self._samples.over

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self._samples.epoch

    @property
    def trainers(self) -> list[TrainerId]:
        """The trainers that are not lost."""
        return list(self._trainers)

    @property
    def done(self) -> int:
        """Samples that updates have used, over all epochs."""
        return self._samples.done

    @property
    def idle(self) -> bool:
        """Whether no trainer has a batch."""
        return not any(trainer.batches for trainer in self._trainers.values())

    def late(self) -> list[TrainerId]:
        """Trainers without a report that they are ready, or with a batch and no gradient."""
        return [key for key, trainer in self._trainers.items() if self._owes(trainer) or not trainer.ready]

    def computes(self, key: TrainerId, number: int) -> bool:
        """Whether gradient `number` of the trainer `key` is the next to arrive: all before it are here."""
        trainer = self._trainers.get(key)
        if trainer is None:
            return False
        missing = (each for each in trainer.batches if GradientKey(key, each) not in self._gradients)
        return min(missing, default=number) >= number

    def is_ready(self, key: TrainerId) -> bool:
        """Whether the trainer `key` has reported ready, or sent a gradient."""
        return self._trainers[key].ready

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: which training samples are used."""
        return {"version": self.version, **self._samples.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError if it is of other data."""
        self._samples.load_state_dict(state)
        self.version = state["version"]

    # ---- events

    def join(self, key: TrainerId) -> None:
        """A trainer has joined the others: updates go on without it until it reports that it is ready."""
        self._trainers[key] = _Trainer(joined=True)

    def take(self, key: GradientKey, version: int, samples: int) -> DueUpdate | None:
        """A gradient of `samples` samples has arrived, computed with the parameters after update `version`; with no
        samples it reports that its trainer is ready. Returns the update that is due, if any.

        A gradient of staleness s is applied at 1/s of the rate (Zhang et al. 2016, staleness-aware async-SGD): at the
        full rate, momentum and staleness together diverge.
        """
        trainer = self._trainers.get(key.trainer)
        if trainer is None:
            return None  # lost meanwhile
        trainer.ready = True
        trainer.waiting.append(key)
        staleness = 0 if self.sync else self.version - version
        if samples and staleness > self.max_staleness:
            self.refused += 1
            self._samples.put_back(trainer.batches.pop(key.number))
        elif samples:
            batch = trainer.batches[key.number]
            trainer.batches[key.number] = batch[:samples]
            self._samples.put_back(batch[samples:])
            self._gradients[key] = samples
            trainer.sent += 1
        return self._close(1 / max(1, staleness))

    def lose(self, lost: TrainerId) -> DueUpdate | None:
        """A trainer is lost: the open update closes without it, and its batches are handed out again."""
        trainer = self._trainers.pop(lost, None)
        if trainer is None:
            return None
        self._gradients = {key: samples for key, samples in self._gradients.items() if key.trainer != lost}
        for _, batch in sorted(trainer.batches.items(), reverse=True):
            if self.shares:
                self._open.append(batch)
            else:
                self._samples.put_back(batch)
        return self._close(1.0)

    # ---- how

    def _owes(self, trainer: _Trainer) -> bool:
        """Whether an update waits for a gradient of the trainer."""
        return trainer.sent < (len(trainer.batches) if self.shares else min(1, len(trainer.batches)))

    def _close(self, rate: float) -> DueUpdate | None:
        """Closes the open update unless it waits for a trainer. Returns None if nothing changes and no trainer is
        answered.
        """
        waits = self.sync and any(self._owes(one) or not (one.ready or one.joined) for one in self._trainers.values())
        if self._open:
            return self._deal_again(waits)
        if waits or not self._trainers:
            return None
        total = sum(self._gradients.values())
        keys = sorted(self._gradients, key=self._place) if self.shares else self._gradients
        weights = {key: self._gradients[key] / total for key in keys}
        for key in weights:
            trainer = self._trainers[key.trainer]
            self._samples.use(trainer.batches.pop(key.number))
            trainer.sent = 0
        self.version += bool(weights)
        self._gradients = {}
        self._samples.advance()
        if self.shares:
            self._open = self._divide()
        batches = self._hand_out()
        return DueUpdate(weights, rate if weights else 1.0, batches) if weights or batches else None

    def _place(self, key: GradientKey) -> int:
        """The place of a gradient's batch in the open update."""
        return self._places[int(self._trainers[key.trainer].batches[key.number][0])]

    def _divide(self) -> list[Indices]:
        """The batches of the next update."""
        sizes = (self._size(self.shares - place) for place in range(self.shares))
        batches = [self._samples.draw(size) for size in sizes if size]
        self._places = {int(batch[0]): place for place, batch in enumerate(batches)}
        return batches

    def _deal_again(self, waits: bool) -> DueUpdate | None:
        """Hands out the batches that trainers had who were lost: to those who have none, or else, once the update waits
        for nobody, the whole update is made again, evenly, without the gradients that are here.
        """
        if not any(trainer.waiting and not trainer.batches for trainer in self._trainers.values()):
            if waits:
                return None
            for trainer in self._trainers.values():
                self._open += trainer.batches.values()
                trainer.batches, trainer.sent = {}, 0
            self._gradients = {}
        batches = self._hand_out()
        return DueUpdate({}, 1.0, batches) if batches else None

    def _hand_out(self) -> dict[GradientKey, list[Indices]]:
        """Batches for the waiting trainers, by the gradient to answer. A trainer without any batch waits on."""
        waiting = [trainer for trainer in self._trainers.values() if trainer.waiting]
        answers: dict[GradientKey, list[Indices]] = {key: [] for trainer in waiting for key in trainer.waiting}

        def assign(trainer: _Trainer, batch: Indices) -> None:
            trainer.assigned += 1
            trainer.batches[trainer.assigned] = batch
            answers[trainer.waiting[0]].append(batch % self.samples)

        if self.shares:
            ready = [name for name, trainer in self._trainers.items() if trainer.waiting and not trainer.batches]
            for place, name in enumerate(ready[: len(self._open)]):
                trainer = self._trainers[name] = self._trainers.pop(name)  # the last to have a turn again
                for batch in self._open[place :: len(ready)]:
                    assign(trainer, batch)
            self._open = [] if ready else self._open
        else:
            for held in range(self.ahead):  # every trainer has one batch before any has two
                lacking = [trainer for trainer in waiting if len(trainer.batches) == held]
                for place, trainer in enumerate(lacking):
                    if size := self._size(len(lacking) - place):
                        assign(trainer, self._samples.draw(size))
        for trainer in waiting:
            # with `shares`, one that has batches already waits for the update; at the end, an answer has no batches
            if (answers[trainer.waiting[0]] if self.shares else trainer.batches) or self.over:
                trainer.waiting.clear()
            else:
                for key in trainer.waiting:
                    del answers[key]
        return answers

    def _size(self, claims: int) -> int:
        """The samples of the next batch, 0 if none are left. With `sync`, `claims` trainers share the end of an epoch
        evenly.
        """
        left = self._samples.left
        if not self.sync:
            return min(self.batch, left)
        if self._samples.is_early:  # all trainers share the next epoch, whichever draws from it first
            ready = [trainer for trainer in self._trainers.values() if trainer.ready]
            having = (any(map(self._samples.is_next, trainer.batches.values())) for trainer in ready)
            claims = max(1, len(ready) - sum(having))
        share = -(-left // claims)
        if claims > 1 and share >= self.grain:
            share = round(share / self.grain) * self.grain
        return min(self.batch, share, left)


class SampleTickets:
    """The samples 0 to `count` of `epochs` epochs, in an order given by `seed` and the epoch.

    A *ticket* is one use of one sample: epoch * `count` + sample. Each ticket is drawn, and then used or put back. With
    `early`, tickets of the next epoch are drawn while some of this epoch are not yet used.
    """

    def __init__(self, count: int, epochs: int, seed: int, early: bool = False) -> None:
        self.count, self.epochs, self.seed, self.early = count, epochs, seed, early
        self.epoch = 0
        self._used = np.zeros((2, count), bool)  # of this epoch, and of the next
        self._left: list[deque[int]] = []  # of this epoch, and, if `early`, of the next
        self._begin()

    @property
    def over(self) -> bool:
        """Whether all epochs are done."""
        return self.epoch >= self.epochs

    @property
    def done(self) -> int:
        """Tickets that are used."""
        return self.epoch * self.count + int(self._used[: max(0, self.epochs - self.epoch)].sum())

    @property
    def left(self) -> int:
        """Tickets of one epoch that can be drawn."""
        return 0 if self.over else len(self._left[self.is_early])

    @property
    def is_early(self) -> bool:
        """Whether tickets of the next epoch are drawn."""
        return self.early and not self._left[0] and self.epoch + 1 < self.epochs

    def is_next(self, tickets: Indices) -> bool:
        """Whether `tickets` [n], drawn at once, are of the next epoch."""
        return bool(tickets[0] // self.count > self.epoch)

    def draw(self, size: int) -> Indices:
        """The next `size` tickets, at most `left`: all of one epoch."""
        queue = self._left[self.is_early]
        return np.array([queue.popleft() for _ in range(size)], np.int64)

    def put_back(self, tickets: Indices) -> None:
        """`tickets` [n], drawn at once, are the next to be drawn again."""
        if len(tickets):
            self._left[self.is_next(tickets)].extendleft(reversed(tickets.tolist()))

    def use(self, tickets: Indices) -> None:
        """`tickets` [n] are used."""
        epochs, samples = np.divmod(tickets, self.count)
        self._used[epochs - self.epoch, samples] = True

    def advance(self) -> None:
        """Begins the next epoch if this one is used up."""
        while self._used[0].all() and not self.over:
            self.epoch += 1
            self._used = np.stack([self._used[1], np.zeros(self.count, bool)])
            following = self._order(self.early)
            self._left = [self._left[1], following] if self.early else [following]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the epoch, and bits of the used samples of it and of the next."""
        used, following = (torch.from_numpy(np.packbits(mask)) for mask in self._used)
        return {"epoch": self.epoch, "used": used, "following": following, "samples": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError if it is of other data."""
        if state["samples"] != self.count:
            raise ValueError(f"the checkpoint is of {state['samples']} training samples; DATASET has {self.count}")
        masks = [np.unpackbits(state[name].numpy(), count=self.count) for name in ("used", "following")]
        self.epoch, self._used = state["epoch"], np.array(masks, bool)
        self._begin()
        self.advance()

    def _begin(self) -> None:
        self._left = [self._order(following) for following in ((False, True) if self.early else (False,))]

    def _order(self, following: bool) -> deque[int]:
        """The unused tickets of this epoch, or of the next."""
        epoch = self.epoch + following
        order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return deque((epoch * self.count + order[~self._used[int(following)][order]]).tolist())
