"""Runs what may take long, or call the user's code, apart from threads that others wait for."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rolecall import telemetry

FAILED = "a callback has failed"
MAX_IDLE = 8  # threads that wait for more; further ones end


class _Threads:
    """Threads as needed: each runs one function at a time, and none waits for another."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[..., object], *args: Any) -> None:
        with self._lock:
            is_idle = self._idle > 0
            self._idle -= is_idle
        if is_idle:
            self._work.put((function, args))
        else:
            threading.Thread(target=self._serve, args=(function, args), name="wire apart", daemon=True).start()

    def _serve(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        while True:
            try:
                function(*args)
            except BaseException:  # such as a callback's: nobody else learns of it
                telemetry.log().exception(FAILED)
            del function, args  # they may hold large values
            with self._lock:
                if self._idle >= MAX_IDLE:
                    return
                self._idle += 1
            function, args = self._work.get()


run = _Threads().run


class Ordered:
    """Runs functions apart from who asks for it, one after the other."""

    def __init__(self) -> None:
        self._work = deque[Callable[[], object]]()
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether it runs something."""
        return bool(self._work)

    def run(self, function: Callable[..., object], *args: Any) -> None:
        """Runs `function` once those before have returned."""
        with self._lock:
            self._work.append(partial(function, *args))
            is_first = len(self._work) == 1
        if is_first:
            run(self._run_all)

    def _run_all(self) -> None:
        while True:
            try:
                self._work[0]()
            except BaseException:
                telemetry.log().exception(FAILED)
            with self._lock:
                self._work.popleft()
                if not self._work:
                    return
