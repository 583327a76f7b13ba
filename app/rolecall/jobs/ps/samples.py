"""Which samples of an epoch are left to hand out, and which are used. Pure logic."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from rolecall.jobs.ps.messages import Indices


class Samples:
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
        used = np.zeros((2, self.count), bool)
        for place, name in enumerate(("used", "following")):
            if name in state:  # earlier versions draw from one epoch
                used[place] = np.unpackbits(state[name].numpy(), count=self.count)
        self.epoch, self._used = state["epoch"], used
        self._begin()
        self.advance()

    def _begin(self) -> None:
        self._left = [self._order(following) for following in ((False, True) if self.early else (False,))]

    def _order(self, following: bool) -> deque[int]:
        """The unused tickets of this epoch, or of the next."""
        epoch = self.epoch + following
        order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return deque((epoch * self.count + order[~self._used[int(following)][order]]).tolist())
