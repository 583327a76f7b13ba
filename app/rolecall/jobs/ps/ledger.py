"""The ledger: who computes which samples, and when an update closes. Pure logic.

Every sample counts once an epoch: it is handed out, and it is marked as used together with the update that has its
gradient. What a trainer has in hand when it is lost is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rolecall.jobs.ps.messages import GradientKey, Indices
from rolecall.jobs.ps.samples import Samples


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
    """`batches` are in hand, as tickets of `Samples`, their gradients not yet used; a batch has the number of the
    gradient that will be computed from it, and gradients may overtake each other. `waiting` are those whose answers are
    due, `sent` counts those of the open update, `assigned` all batches so far; `revoked` are numbers of late gradients
    that will be dropped, since their batches were handed out again.
    """

    batches: dict[int, Indices] = field(default_factory=dict)
    assigned: int = 0
    waiting: list[GradientKey] = field(default_factory=list)
    sent: int = 0
    ready: bool = False
    revoked: set[int] = field(default_factory=set)


class Ledger:
    """Hands out `samples` samples in batches of at most `batch`, in an order given by `seed` and the epoch.

    `sync` says whether an update waits for all trainers, or each gradient is one; `ahead` is how many batches a trainer
    has in hand at once. After `epochs` it is over.

    A gradient may be of fewer samples than its batch has: the rest is handed out again. Where an update waits for all
    and each has a batch more in hand (`ahead` 2), that one may be of the next epoch. Batches are multiples of `grain`
    samples as far as possible: the trainer's own, smaller batches.

    With `backup` trainers, an update of `sync` waits for all but so many (Chen et al. 2016, Revisiting distributed
    synchronous SGD, arXiv 1604.00981). The batches of those that are late are handed out again, or, with `use_late`,
    their gradients are a part of the update that is open when they arrive.
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
        backup: int = 0,
        use_late: bool = False,
        grain: int = 1,
    ) -> None:
        self.samples, self.batch, self.epochs, self.grain = samples, batch, epochs, grain
        self.sync, self.ahead, self.max_staleness = sync, ahead, max_staleness
        self.backup, self.use_late = backup, use_late
        self.version = 0
        self.refused = self.dropped = 0  # gradients: too stale, and late
        self._trainers = {name: _Trainer() for name in trainers}
        self._gradients: dict[GradientKey, int] = {}  # of the open update, with their samples
        self._staleness: dict[GradientKey, int] = {}  # of these
        self._samples = Samples(samples, epochs, seed, early=sync and ahead > 1)

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
    def trainers(self) -> list[str]:
        """Those that are not lost."""
        return list(self._trainers)

    def has(self, name: str) -> bool:
        """Whether the trainer `name` is there, and not lost."""
        return name in self._trainers

    @property
    def used(self) -> int:
        """Samples of this epoch that an update has used."""
        return self._samples.used

    @property
    def done(self) -> int:
        """Samples that updates have used, over all epochs."""
        return self._samples.done

    @property
    def idle(self) -> bool:
        """Whether nobody has a batch in hand."""
        return not any(trainer.batches for trainer in self._trainers.values())

    def late(self) -> list[str]:
        """Those who have a batch in hand and have sent no gradient, or who have not reported ready."""
        return [
            name
            for name, trainer in self._trainers.items()
            if not trainer.ready or (trainer.batches and not trainer.sent) or trainer.revoked
        ]

    def computes(self, name: str, number: int) -> bool:
        """Whether gradient `number` is the next to come of the trainer `name`: none before it is still on its way."""
        trainer = self._trainers.get(name)
        if trainer is None:
            return False
        missing = (each for each in trainer.batches if GradientKey(name, each) not in self._gradients)
        return min(missing, default=number) >= number

    def is_ready(self, name: str) -> bool:
        """Whether the trainer `name` has reported ready, or sent a gradient."""
        return self._trainers[name].ready

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how far the training data is used."""
        return {"version": self.version, **self._samples.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where it is of other data."""
        self._samples.load_state_dict(state)
        self.version = state["version"]

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
        staleness = 0 if self.sync and not self.backup else self.version - version
        if key.number in trainer.revoked:
            self.dropped += 1
            trainer.revoked.remove(key.number)
        elif samples and staleness > self.max_staleness:
            self.refused += 1
            self._samples.put_back(trainer.batches.pop(key.number))
        elif samples:
            batch = trainer.batches[key.number]
            trainer.batches[key.number] = batch[:samples]
            self._samples.put_back(batch[samples:])
            self._gradients[key], self._staleness[key] = samples, staleness
            trainer.sent += 1
        return self._close()

    def lose(self, name: str) -> Update | None:
        """A trainer is lost: the open update closes without it, and its batches are handed out again."""
        trainer = self._trainers.pop(name, None)
        if trainer is None:
            return None
        self._gradients = {key: samples for key, samples in self._gradients.items() if key.trainer != name}
        self._staleness = {key: staleness for key, staleness in self._staleness.items() if key.trainer != name}
        for _, batch in sorted(trainer.batches.items(), reverse=True):
            self._samples.put_back(batch)
        return self._close()

    # ---- how

    def _close(self) -> Update | None:
        """Closes the open update, unless it waits for a trainer. None where nothing changes and nobody is answered."""
        weights: dict[GradientKey, float] = {}
        rate = 1.0
        if not (self.sync and self._waits()):
            weights, rate = self._weights()
            for key in weights:
                trainer = self._trainers[key.trainer]
                self._samples.use(trainer.batches.pop(key.number))
                trainer.sent -= 1
            self.version += bool(weights)
            self._gradients, self._staleness = {}, {}
            self._revoke()
            self._samples.advance()
        elif not self.backup:
            return None
        batches = self._hand_out()
        if not weights and not batches:
            return None
        return Update(weights, rate, batches)

    def _waits(self) -> bool:
        """Whether an update of `sync` waits for a trainer: for any, or for more than the `backup` trainers. Who has
        nothing to compute is not waited for; a late gradient does not stand for its trainer's next one.
        """
        late, stale = len(self.late()), sum(map(bool, self._staleness.values()))
        if not late or not self.backup:
            return late > 0
        return late + stale > self.backup or not self._gradients

    def _weights(self) -> tuple[dict[GradientKey, float], float]:
        """The weights of the open update's gradients, and its rate: together the mean by samples, each gradient divided
        by its staleness (Zhang et al. 2016, staleness-aware async-SGD): without that, momentum and staleness together
        diverge.
        """
        if not self._gradients:
            return {}, 1.0
        shares = {key: samples / max(1, self._staleness[key]) for key, samples in self._gradients.items()}
        total = sum(shares.values())
        return {key: share / total for key, share in shares.items()}, total / sum(self._gradients.values())

    def _revoke(self) -> None:
        """Takes the batches of those that are late, to hand them out again; with `use_late` only where the rest of the
        epoch would wait for them.
        """
        if not self.backup or (self.use_late and self._samples.left):
            return
        for trainer in self._trainers.values():
            trainer.revoked |= trainer.batches.keys()
            for _, batch in sorted(trainer.batches.items(), reverse=True):
                self._samples.put_back(batch)
            trainer.batches.clear()

    def _hand_out(self) -> dict[GradientKey, list[Indices]]:
        """Batches for the trainers that wait, by gradient to answer. Who gets none, and has none in hand, waits on."""
        answers: dict[GradientKey, list[Indices]] = {}
        waiting = [trainer for trainer in self._trainers.values() if trainer.waiting and not trainer.sent]
        for trainer in waiting:
            answers |= {key: [] for key in trainer.waiting}
        for held in range(self.ahead):  # nobody has two batches before all have one
            lacking = [trainer for trainer in waiting if len(trainer.batches) == held]
            for place, trainer in enumerate(lacking):
                if size := self._size(len(lacking) - place):
                    batch = self._samples.draw(size)
                    trainer.assigned += 1
                    trainer.batches[trainer.assigned] = batch
                    answers[trainer.waiting[0]].append(batch % self.samples)
        for trainer in waiting:
            if trainer.batches or self.over:  # nothing more to do is an answer too
                trainer.waiting.clear()
            else:
                for key in trainer.waiting:
                    del answers[key]
        return answers

    def _size(self, claims: int) -> int:
        """The samples of the next batch, 0 where none are left. Where trainers wait for each other, the end of an epoch
        is shared evenly by the `claims` that are left.
        """
        left = self._samples.left
        if not self.sync:
            return min(self.batch, left)
        if self._samples.is_early:  # all share the next epoch, whoever draws from it first
            having = (any(map(self._samples.is_next, trainer.batches.values())) for trainer in self._trainers.values())
            claims = max(1, len(self._trainers) - sum(having))
        share = -(-left // claims)
        if claims > 1 and share >= self.grain:
            share = round(share / self.grain) * self.grain
        return min(self.batch, share, left)
