"""A server's reports to the lead: which gradients it has all of its parts of."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls
from rolecall.jobs.ps.messages import GradientKey


class Reports:
    """Reports gradients to the lead in the order of `add`, in one call at a time: what is added meanwhile goes with the
    next one. So a lead that is idle hears of each at once, and one that is busy gets fewer, longer messages.

    A call that fails is logged, counted under `rolecall_rpc_failures_total`, and not repeated, since the lead may have
    heard it. A lead that is lost ends the generation; one that is not gives up trainers whose gradients do not come.

    Any thread may `add`.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self._context = context
        self._lock = threading.Lock()  # of the two below
        self._waiting: list[GradientKey] = []
        self._under_way = False

    def add(self, key: GradientKey) -> None:
        """Reports a gradient, at once or with the next report."""
        with self._lock:
            self._waiting.append(key)
            if self._under_way:
                return
            self._under_way = True
        self._send()

    def _send(self) -> None:
        """Reports what waits. Only for the one that set `_under_way`, or was called with the answer."""
        while keys := self._take():
            try:
                answer = self._context.call(self._context.members[0], calls.complete, keys)
            except Exception as error:  # of several kinds; nobody is above an answer's thread to catch it
                self._log(keys, error)
            else:
                answer.add_done_callback(partial(self._answered, keys))
                return

    def _take(self) -> list[GradientKey]:
        with self._lock:
            keys, self._waiting = self._waiting, []
            self._under_way = bool(keys)
            return keys

    def _answered(self, keys: list[GradientKey], answer: Any) -> None:
        try:
            answer.value()
        except Exception as error:  # of several kinds
            self._log(keys, error)
        self._send()

    def _log(self, keys: list[GradientKey], error: Exception) -> None:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._context.logger.warning("gradients not reported to the lead", gradients=len(keys), problem=problem)
