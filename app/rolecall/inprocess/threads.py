"""The threads of one worker, which end together: Python has no way to end a thread, so each has to raise `Ended`."""

from __future__ import annotations

import concurrent.futures.thread as executors
import contextlib
import ctypes
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall.declare import loader
from rolecall.wire import apart

CHECKPOINT = loader.PACKAGE / "checkpoint"
_owners = weakref.WeakKeyDictionary[threading.Thread, "Threads"]()
start_alone = threading.Thread.start  # starts a thread that belongs to no worker


class Ended(BaseException):
    """Ends a thread of a worker that has ended, or was killed."""


class Threads:
    """The threads of the worker `name`: what `start` starts, and all that they start. Each line that they log has its
    `labels`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.labels: dict[str, Any] = {}
        self._threads = weakref.WeakSet[threading.Thread]()
        self._lock = threading.Lock()  # for that, to which each of them adds

    def start(self, target: Callable[[], object]) -> None:
        """Starts the main one, which calls `target`."""
        thread = threading.Thread(target=target, name=self.name, daemon=True)
        self._take(thread)
        start_alone(thread)

    def _take(self, thread: threading.Thread) -> None:
        run = thread.run

        def run_until_ended() -> None:
            with contextlib.suppress(Ended):
                run()
            del thread.__dict__["run"]  # which refers to the thread

        thread.run = run_until_ended  # type: ignore[method-assign]
        _owners[thread] = self
        with self._lock:
            self._threads.add(thread)

    def alive(self) -> list[threading.Thread]:
        """Those that run. An executor's, which others may use too, do not while they wait for work."""
        with self._lock:
            threads = [*self._threads]
        return [each for each in threads if each.is_alive() and not _runs(each, executors._worker)]

    @staticmethod
    def interrupt(threads: list[threading.Thread]) -> None:
        """Has `threads` raise `Ended` as soon as they run Python code, which wakes those that wait for each other."""
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        for thread in filter(threading.Thread.is_alive, threads):  # another one may have its number afterwards
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Ended))
            _wake(thread)


def owner() -> Threads | None:
    """The worker that this thread is of."""
    return _owners.get(threading.current_thread())


@contextlib.contextmanager
def acting_for(threads: Threads | None) -> Iterator[None]:
    """The block is of the worker with `threads`, whichever this thread is of."""
    thread, before = threading.current_thread(), owner()
    if threads:
        _owners[thread] = threads
    try:
        yield
    finally:
        if before:
            _owners[thread] = before
        else:
            _owners.pop(thread, None)


def labels() -> dict[str, Any]:
    """What a line has that this thread logs."""
    threads = owner()
    return threads.labels if threads else {}


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Within the block, threads that a worker's threads start are its own too."""
    threading.Thread.start = _start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start_alone  # type: ignore[method-assign]


def _start(self: threading.Thread) -> None:
    if threads := owner():
        threads._take(self)
    start_alone(self)


def _wake(thread: threading.Thread) -> None:
    """Wakes a thread that waits for a condition, an event, a queue or a future."""
    if (frame := _runs(thread, threading.Condition.wait)) and (waiter := frame.f_locals.get("waiter")):
        with contextlib.suppress(RuntimeError):  # it is awake
            waiter.release()


def _runs(thread: threading.Thread, function: Callable[..., Any]) -> FrameType | None:
    """The frame of a thread that is in `function`, and in no Python function that it calls."""
    frame = apart.frames().get(thread.ident or 0)
    return frame if frame and frame.f_code is function.__code__ else None


def writes(thread: threading.Thread) -> bool:
    """Whether a thread is writing a checkpoint."""
    frame = apart.frames().get(thread.ident or 0)
    return any(Path(each.f_code.co_filename).parent == CHECKPOINT for each, _ in traceback.walk_stack(frame))


def place_of(thread: threading.Thread) -> str:
    """The line of the user's code that a thread runs; empty if there is none."""
    frame = apart.frames().get(thread.ident or 0)
    places = [(each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame)] if frame else []
    users = [f"{loader.shown(Path(name))}:{line}" for name, line in places if loader.is_users(name)]
    return users[0] if users else ""
