"""A server's reports to the lead: the gradients that it has all parts of."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls
from rolecall.jobs.ps.messages import GradientKey


class Reports:
    """Reports gradients to the lead in the order of `add`, one call at a time; gradients that are added meanwhile go
    with the next call. An idle lead hears of each at once; a busy one gets fewer, longer messages.

    A failed call is logged, counted under `rolecall_rpc_failures_total`, and not repeated, since the lead may have
    received it. A lost lead ends the generation; a live one gives up trainers whose gradients do not arrive.

    Any thread may call `add`.
    """

    def __init__(self, context: Context[PsSettings]) -> None:
        self._context = context
        self._lock = threading.Lock()  # of the two below
        self._waiting: list[GradientKey] = []
        self._in_flight = False

    def add(self, key: GradientKey) -> None:
        """Reports a gradient, at once or with the next report."""
        with self._lock:
            self._waiting.append(key)
            if self._in_flight:
                return
            self._in_flight = True
        self._send()

    def _send(self) -> None:
        """Reports all waiting gradients. Called by the thread that set `_in_flight`, and with each answer."""
        while keys := self._take():
            try:
                answer = self._context.call(self._context.members[0], calls.complete, keys)
            except Exception as error:  # of several kinds; in an RPC thread no caller would see it
                self._log(keys, error)
            else:
                answer.add_done_callback(partial(self._answered, keys))
                return

    def _take(self) -> list[GradientKey]:
        with self._lock:
            keys, self._waiting = self._waiting, []
            self._in_flight = bool(keys)
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
