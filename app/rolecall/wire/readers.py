"""The threads that read a connection and run what arrives. One reads at a time. It runs a short call itself, since
another thread would cost more than the call; if a call runs for long, another thread reads on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rolecall.wire import apart
from rolecall.wire.frames import Frame

LOOK_SECONDS = 0.002  # between two looks: a call that both see runs for long
IDLE_LOOKS = 50  # after which nobody looks any more, until the next call
EAGER_CALLS = 100  # after a long call, these are not run by the thread that reads
SPARE_THREADS = 2  # that wait to read; further ones end


class LongCallMonitor:
    """The thread of a worker that looks after its long calls."""

    def __init__(self) -> None:
        self._active = set[Readers]()
        self._wake = threading.Event()
        self._stopped = False
        threading.Thread(target=self._look_forever, name="wire long calls", daemon=True).start()

    def add(self, readers: Readers) -> None:
        """Looks at `readers` for as long as it is active."""
        self._active.add(readers)
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._wake.set()

    def _look_forever(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            while self._active and not self._stopped:
                time.sleep(LOOK_SECONDS)
                for readers in list(self._active):
                    self._active.discard(readers)  # before the look: `add` may come at once after it
                    if readers.look():
                        self._active.add(readers)


class Readers:
    """The threads of one connection. `read` returns the next frame that is to be run, None after the end; `run` may
    block."""

    def __init__(
        self, name: str, monitor: LongCallMonitor, read: Callable[[], Frame | None], run: Callable[[Frame], None]
    ) -> None:
        self._name, self._monitor, self._read, self._run = name, monitor, read, run
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._spare = 0  # threads that read, or wait to
        self._number = self._running = 0  # of calls; the one that is run by the thread that reads, or 0
        self._runner = 0  # that thread
        self._seen, self._idle, self._watched = 0, 0, False
        self._eager = 0

    def start(self) -> bool:
        """Begins to read. Returns False if there are too many threads for that."""
        with self._lock:
            return self._add_thread()

    def _add_thread(self) -> bool:
        self._spare += 1
        started = apart.start(self._name, self._serve)
        self._spare -= not started
        return started

    def _serve(self) -> None:
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
        """Reads until another thread does. Returns False at the end of the connection."""
        while (frame := self._read()) is not None:
            if self._eager:
                with self._lock:
                    self._eager -= 1
                    passed_on = self._pass_on()
                self._run(frame)
                if passed_on:
                    return True
                continue
            self._number += 1
            self._runner, number = threading.get_ident(), self._number
            self._running = number
            if not self._watched:
                self._watched = True
                self._monitor.add(self)
            self._run(frame)
            with self._lock:
                if self._running != number:
                    return True
                self._running = 0
        return False

    def _pass_on(self) -> bool:
        """Lets another thread read. Returns False if there are too many for that: this one reads on once it can."""
        if self._spare < 2 and not self._add_thread():
            return False
        self._spare -= 1
        self._running = 0  # first: who reads next sets it
        self._reading.release()
        return True

    def step_aside(self) -> None:
        """This thread will wait: if it is the one that reads, another reads on."""
        with self._lock:
            if self._running and self._runner == threading.get_ident():
                self._pass_on()

    def look(self) -> bool:
        """Lets another thread read if this call was running at the look before. Returns False if there are none."""
        with self._lock:
            if self._running and self._running == self._seen and self._pass_on():
                self._eager = EAGER_CALLS
            self._idle = self._idle + 1 if self._number == self._seen else 0
            self._seen = self._number
            if self._idle < IDLE_LOOKS:
                return True
            self._watched = False  # before it looks, as `_read_on` does: one of them sees the other
            if self._running:
                self._watched = True
            return self._watched
