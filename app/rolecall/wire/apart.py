"""Runs what may take long, or call the user's code, apart from threads that others wait for."""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from rolecall import telemetry

FAILED = "a callback has failed"
TOO_MANY = "this process can start no more threads; raise the limit of processes (ulimit -u, pids.max)"
MAX_IDLE = 8  # threads that wait for more; further ones end
_reading_frames = threading.Lock()


def frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's number."""
    with _reading_frames:
        is_enabled = gc.isenabled()
        try:
            gc.disable()  # until Python 3.11.8 a collection meanwhile can stop all threads for good (gh-106883)
            return sys._current_frames()
        finally:
            if is_enabled:
                gc.enable()


def start(name: str, function: Callable[..., object], *args: Any) -> bool:
    """Runs `function` in a thread of its own. Returns False if this process can start no more threads."""
    try:
        threading.Thread(target=function, args=args, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


class _Threads:
    """Threads as needed: each runs one function at a time, and none waits for another. If no more can be started, work
    waits for one of those that run; without any, who asks for it does it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._idle = 0  # of these; below 0, so much work waits

    def run(self, function: Callable[..., object], *args: Any) -> None:
        with self._lock:
            waits = self._idle > 0
            self._idle -= waits
            self._count += not waits
        if not waits and not start("wire apart", self._serve, function, args):
            with self._lock:
                self._count -= 1
                waits = self._count > 0
                self._idle -= waits
            if not waits:
                self._run(function, args)
        if waits:
            self._work.put((function, args))

    @staticmethod
    def _run(function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException:  # such as a callback's: nobody else learns of it
            telemetry.log().exception(FAILED)

    def _serve(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        while True:
            self._run(function, args)
            del function, args  # they may hold large values
            with self._lock:
                if self._idle >= MAX_IDLE:
                    self._count -= 1
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
