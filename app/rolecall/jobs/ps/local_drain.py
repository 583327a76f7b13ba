"""A drain with UPDATE_MODE=local, at the lead: the open rounds end at their trainers' next steps, and count."""

from __future__ import annotations

import time

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls
from rolecall.jobs.ps.ledger import Ledger

SHARE = 0.5  # of DRAIN_TIMEOUT; what takes longer is given up


class Rounds:
    """The rounds of `ledger` that are open when a drain is ordered."""

    def __init__(self, context: Context[PsSettings], ledger: Ledger) -> None:
        self._context, self._ledger = context, ledger
        self._limit = SHARE * context.settings.drain_timeout
        self._ordered: tuple[int, float] | None = None  # at which version, and when

    def closed(self) -> bool:
        """Whether the rounds that were open are closed, or would take too long. The first call has them end."""
        now, ledger = time.monotonic(), self._ledger
        if ledger.over or ledger.idle:
            return True
        if self._ordered is None:
            self._ordered = ledger.version, now
            for name in ledger.trainers:
                self._context.call(name, calls.end_rounds, ledger.ahead)
        version, since = self._ordered
        if ledger.version >= version + ledger.ahead or now - since > self._limit:
            self._ordered = None  # a drain that is refused may be ordered again
            return True
        return False
