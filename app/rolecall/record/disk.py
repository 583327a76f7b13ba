"""Disk work beside an event loop, in one thread, in order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from rolecall.record.files import using

T = TypeVar("T")


class Disk:
    """A thread for work on files, in order; `longest_work` reports its work in `directory`. A disk that hangs delays
    only the tasks that wait for it.

    It is a daemon: unlike the threads of `asyncio.to_thread`, it never delays the process's end.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns `function(*arguments)`, or raises what it raises. If this wait is cancelled, work that has not begun
        is dropped, and work that has begun goes on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_forever, name="disk", daemon=True)
            self._thread.start()
        work: Future[T] = Future()
        self._work.put((work, partial(function, *arguments)))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Ends the thread after the queued work, without waiting."""
        self._work.put(None)
        self._thread = None

    def _run_forever(self) -> None:
        while (item := self._work.get()) is not None:
            work, call = item
            if not work.set_running_or_notify_cancel():
                continue
            try:
                with using(self._directory) if self._directory else contextlib.nullcontext():
                    result = call()
            except BaseException as error:
                work.set_exception(error)
            else:
                work.set_result(result)
