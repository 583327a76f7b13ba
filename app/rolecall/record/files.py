"""Names of a run's report, files written as a whole, and the work on files under way, beside an event loop too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

HISTORY = "history.jsonl"
SUMMARY = "summary.json"
T = TypeVar("T")


@dataclass(frozen=True)
class FileWork:
    """Work on the file `path`, or in that directory, that has taken `seconds` so far."""

    path: str
    seconds: float


_under_way: dict[int, list[tuple[Path, float]]] = {}  # by thread: paths and monotonic times, the outermost first


@contextlib.contextmanager
def using(path: Path) -> Iterator[None]:
    """Registers the block's work on `path` for `longest_work`."""
    entries = _under_way.setdefault(threading.get_ident(), [])
    entries.append((path, time.monotonic()))
    try:
        yield
    finally:
        entries.pop()
        if not entries:
            del _under_way[threading.get_ident()]


def longest_work() -> FileWork | None:
    """The work on files that has taken this process longest, of that under way, with the innermost path. Safe to use
    from several threads.
    """
    stacks = [entries for each in list(_under_way.values()) if (entries := list(each))]
    if not stacks:
        return None
    oldest = min(stacks, key=lambda entries: entries[0][1])
    return FileWork(str(oldest[-1][0]), time.monotonic() - oldest[0][1])


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Writes `parts` to a file that after a crash at any moment is either complete or as it was. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with using(path):
        try:
            if temporary.is_symlink():  # in a directory from elsewhere: nothing is written outside of it
                temporary.unlink()
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        except OSError:
            with contextlib.suppress(OSError):  # the write's error is more useful
                temporary.unlink(missing_ok=True)
            raise


def sync_directory(directory: Path) -> None:
    """Writes the names in `directory` to disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
