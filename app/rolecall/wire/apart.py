"""Runs what may take long, or call the user's code, apart from threads that others wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from rolecall import telemetry

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
                telemetry.log().exception("what a call has led to has failed")
            del function, args  # they may hold large values
            with self._lock:
                if self._idle >= MAX_IDLE:
                    return
                self._idle += 1
            function, args = self._work.get()


run = _Threads().run
