"""A server's reports to the lead: the gradients that it has all parts of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rolecall.jobs.ps.messages import GradientKey


class Reports:
    """Reports gradients by `send`, which calls the lead, in the order of `add`, one call at a time; gradients that are
    added meanwhile go with the next call. An idle lead hears of each at once; a busy one gets fewer, longer messages.

    A failed call is logged, counted under `rolecall_rpc_failures_total`, and not repeated, since the lead may have
    received it. A lost lead ends the generation; a live one gives up trainers whose gradients do not arrive.

    Any thread may call `add`.
    """

    def __init__(self, logger: Any, send: Callable[[list[GradientKey]], Future[None]]) -> None:
        self._logger, self._call = logger, send
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
        if keys := self._take():
            self._call(keys).add_done_callback(partial(self._answered, keys))

    def _take(self) -> list[GradientKey]:
        with self._lock:
            keys, self._waiting = self._waiting, []
            self._in_flight = bool(keys)
            return keys

    def _answered(self, keys: list[GradientKey], answer: Future[None]) -> None:
        if error := answer.exception():
            problem = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._logger.warning("gradients not reported to the lead", gradients=len(keys), problem=problem)
        self._send()
