"""How long the lead waits for each trainer."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rolecall import Context
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.events import CHECK_SECONDS, trainers_in
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import TrainerId

PAUSE_SECONDS = 1.0  # between two checks after which the lead was busy or suspended


class Patience:
    """Gives up a trainer whose gradient takes longer than STEP_TIMEOUT, or which loads its data for longer than
    PHASE_TIMEOUT. While the lead does something else, such as saving, gradients wait in its inbox: that time does not
    count.
    """

    def __init__(self, context: Context[PsSettings], ledger: Ledger) -> None:
        self._context, self._ledger = context, ledger
        self._checked_at = time.monotonic()
        self._heard_at = dict.fromkeys(ledger.trainers, self._checked_at)

    def heard(self, trainers: Iterable[TrainerId]) -> None:
        """Each of `trainers` has sent a gradient or got an answer."""
        self._heard_at |= dict.fromkeys(trainers, time.monotonic())

    def check(self) -> None:
        """Gives up late trainers, at most every CHECK_SECONDS. Raises PeerLostError if no trainer is left."""
        now, context, s = time.monotonic(), self._context, self._context.settings
        elapsed = now - self._checked_at
        if elapsed < CHECK_SECONDS:
            return
        self._checked_at = now
        if elapsed > PAUSE_SECONDS:
            self._heard_at = {trainer: min(heard + elapsed, now) for trainer, heard in self._heard_at.items()}
        # one that has joined since the last check is heard now
        self._heard_at = {trainer: self._heard_at.get(trainer, now) for trainer in self._ledger.trainers}
        for trainer in self._ledger.late():
            ready = self._ledger.is_ready(trainer)
            limit = s.step_timeout if ready else s.phase_timeout
            if now - self._heard_at[trainer] > limit and trainer in trainers_in(context):
                problem = f"no gradient within {'STEP_TIMEOUT' if ready else 'PHASE_TIMEOUT'}={limit:g} s"
                context.logger.warning("trainer given up", trainer=trainer.name, problem=problem)
                context.give_up(trainer.name)  # which changes the members
        context.require_peers("trainer")
