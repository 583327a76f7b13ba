"""The threads that read a worker's links and run what arrives. One reads at a time, all links. It runs a short call
itself, since another thread would cost more than the call; if a call waits or runs for long, another thread reads on.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, Protocol

from rolecall.wire import apart

LOOK_SECONDS = 0.002  # between two looks: a call that both see runs for long
IDLE_LOOKS = 50  # after which nobody looks any more, until the next call
SHORT_SECONDS = 0.0002  # a call that takes no longer is not worth another thread
LONG_CALLS = 16  # of a method after a long one: another thread reads on before they begin
SPARE_THREADS = 8  # that read, or wait to; further ones end
_here = threading.local()  # `readers`: those that this thread is one of


class Source(Hashable, Protocol):
    """What is read: `receive` takes what has arrived at the file `fileno`, without a wait. `next` returns what is to be
    run of that, and None if there is nothing; it calls `remove` if there will be nothing more. `run` may wait."""

    def fileno(self) -> int: ...  # noqa: D102
    def receive(self) -> None: ...  # noqa: D102
    def next(self) -> Any: ...  # noqa: D102
    def run(self, work: Any) -> None: ...  # noqa: D102


def step_aside() -> None:
    """This thread will wait: if it is one that reads, another one reads on."""
    if readers := getattr(_here, "readers", None):
        readers.pass_on_from_here()


class LongMethods:
    """The methods whose calls may run for long, as one of late has, or does now: another thread reads on meanwhile."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}  # that may, of each method

    def begin(self, method: str) -> int:
        """A call begins. Returns what `end` needs."""
        calls = self._calls.get(method, 0)
        if calls:
            step_aside()
        self._calls[method] = LONG_CALLS  # until it has ended
        return calls

    def end(self, method: str, calls: int, seconds: float) -> None:
        """The call has taken `seconds`."""
        if seconds <= SHORT_SECONDS:
            self._calls[method] = max(0, calls - 1)


class Readers:
    """The threads of a worker, until it has no sources after `stop`."""

    def __init__(self) -> None:
        self._epoll, self._bell = select.epoll(), os.eventfd(0)  # the bell: there is news of the sources
        self._epoll.register(self._bell, select.EPOLLIN)
        self._sources: dict[int, Source] = {}  # by file
        self._added = deque[Source]()  # that may have received something before
        self._ready: dict[Source, None] = {}  # that may have something to run: the thread's that reads
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._spare = 0  # threads that read, or wait to
        self._number = self._running = 0  # of calls; the one that is run by the thread that reads, or 0
        self._runner = 0  # that thread
        self._watched, self._stopped = threading.Event(), False
        threading.Thread(target=self._look_forever, name="wire long calls", daemon=True).start()

    def add(self, source: Source) -> bool:
        """Reads `source` from now on. Returns False if there are too many threads for that, or after the end."""
        with self._lock:
            if not self._spare and (self._stopped or not self._add_thread()):
                return False
            self._sources[source.fileno()] = source
            self._epoll.register(source.fileno(), select.EPOLLIN)
            self._added.append(source)
            os.eventfd_write(self._bell, 1)
        return True

    def remove(self, source: Source) -> None:
        """`source` is not read any more. Its `next` calls this."""
        with self._lock:
            del self._ready[source], self._sources[source.fileno()]
            self._epoll.unregister(source.fileno())

    def stop(self) -> None:
        """Ends the threads with the last source."""
        with self._lock:
            self._stopped = True
            os.eventfd_write(self._bell, 1)
            self._close_unused()

    def _close_unused(self) -> None:
        """Closes what the threads have waited for, after the last one. With the lock held."""
        if self._stopped and not self._spare and not self._epoll.closed:
            self._epoll.close()
            os.close(self._bell)
            self._watched.set()  # nobody looks any more

    # ---- threads

    def _add_thread(self) -> bool:
        self._spare += 1
        started = apart.start("wire reader", self._serve)
        self._spare -= not started
        return started

    def _serve(self) -> None:
        _here.readers = self
        while True:
            self._reading.acquire()
            if not self._read_on():
                self._reading.release()  # the others find the end too
                return
            with self._lock:
                if self._spare >= SPARE_THREADS:
                    return
                self._spare += 1

    def _read_on(self) -> bool:
        """Reads until another thread does. Returns False at the end."""
        while (next_ := self._next()) is not None:
            source, work = next_
            self._number = number = self._number + 1
            self._runner = threading.get_ident()
            self._running = number
            if not self._watched.is_set():
                self._watched.set()
            source.run(work)
            with self._lock:
                if self._running != number:
                    return True
                self._running = 0
        return False

    def _next(self) -> tuple[Source, Any] | None:
        """What is to be run next, and by whom; None at the end."""
        ready = self._ready
        while True:
            while ready:
                source = next(iter(ready))
                if (work := source.next()) is not None:
                    return source, work
                ready.pop(source, None)
            with self._lock:
                if self._stopped and not self._sources:
                    self._spare -= 1
                    self._close_unused()
                    return None
            for file, _ in self._epoll.poll():
                if file == self._bell:
                    os.eventfd_read(file)
                    while self._added:
                        added = self._added.popleft()
                        if self._sources.get(added.fileno()) is added:  # still
                            ready[added] = None
                elif arrived := self._sources.get(file):
                    arrived.receive()
                    ready[arrived] = None

    def _pass_on(self) -> bool:
        """Lets another thread read. Returns False if there are too many for that: this one reads on once it can. With
        the lock held."""
        if self._spare < 2 and not self._add_thread():
            return False
        self._spare -= 1
        self._running = 0  # first: who reads next sets it
        self._reading.release()
        return True

    def pass_on_from_here(self) -> None:
        """This thread will wait."""
        with self._lock:
            if self._running and self._runner == threading.get_ident():
                self._pass_on()

    def _look_forever(self) -> None:
        """Has another thread read on if a call runs for long."""
        while not self._epoll.closed:
            self._watched.wait()
            seen = idle = 0
            while idle < IDLE_LOOKS and not self._epoll.closed:
                time.sleep(LOOK_SECONDS)
                with self._lock:
                    if self._running and self._running == seen:
                        self._pass_on()
                    idle = idle + 1 if self._number == seen else 0
                    seen = self._number
            self._watched.clear()  # before it looks, as `_read_on` does: one of them sees the other
            if self._running or self._epoll.closed:
                self._watched.set()
