"""The end of the program in every rank: by its return, or by SIGTERM, which a drain sends to all ranks.

The ranks exchange their states in the store of the generation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from rolecall import Context
from rolecall.jobs.script import ScriptSettings

DRAIN = "drain"
RETURNED, STOPPED = "returned", "stopped"
WAIT_PERIOD = timedelta(minutes=10)  # waits are repeated without a deadline, because the gang ends the process
SIGTERM_SHARE = 0.75  # of DRAIN_TIMEOUT, for which the rank waits for the program to end after SIGTERM


class Ending:
    """The end of the program in this rank and the others. A drain sends SIGTERM to the program from now on.

    Raises torch's DistError if the worker of rank 0 is gone.
    """

    def __init__(self, context: Context[ScriptSettings]) -> None:
        self._context, self._rank, self._world_size = context, context.me.rank, len(context.members)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = False  # SIGTERM was sent to the program
        self._no_handler = signal.getsignal(signal.SIGTERM)  # the worker's, which does nothing
        self._signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # receives the number of each signal
        self._over = threading.Event()
        self._store, waiting = (PrefixStore("ending", context.torch.store().clone()) for _ in range(2))
        threading.Thread(target=self._obey_drain, args=(waiting,), name="drain", daemon=True).start()

    def end(self) -> bool:
        """Records that the program of this rank has ended. Returns False if that was recorded before."""
        with self._lock:
            if self._over.is_set():
                return False
            stopped = self._stopped or self._was_signalled()
            self._store.set(f"ended-{self._rank}", STOPPED if stopped else RETURNED)
            self._over.set()
            return True

    @property
    def has_ended(self) -> bool:
        """Whether the program of this rank has ended, by itself or by SIGTERM."""
        return self._over.is_set()

    def summary(self) -> dict[str, Any] | None:
        """Waits until the program has ended in every rank. None if SIGTERM ended one: the job has drained."""
        keys = [f"ended-{rank}" for rank in range(self._world_size)]
        _wait(self._store, keys)
        if any(self._store.get(key) != RETURNED.encode() for key in keys):
            return None
        seconds = round(time.monotonic() - self._began, 3)
        return {"ranks": self._world_size, "generation": self._context.generation, "seconds": seconds}

    def _obey_drain(self, store: Store) -> None:
        try:
            if self._rank == 0:
                self._context.await_drain()
                store.set(DRAIN, "")
            else:
                _wait(store, [DRAIN])
            self._stop()
        except DistError:  # the worker of rank 0 is gone, and the gang ends this process
            return

    def _stop(self) -> None:
        """Sends SIGTERM. A program without a handler ends immediately, one with a handler may take time. An error after
        that does not count; the process is killed once the programs of all ranks have ended.
        """
        with self._lock:
            if self.has_ended:
                return
            self._stopped = True
        self._context.logger.info("SIGTERM sent to the program")
        if self._has_handler():
            os.kill(os.getpid(), signal.SIGTERM)
            seconds = SIGTERM_SHARE * self._context.settings.drain_timeout
            if not self._over.wait(seconds):
                self._context.logger.warning("the program did not end after SIGTERM", seconds=seconds)
        if self.end() and self._rank == 0:
            self._context.conclude(self.summary())

    def _has_handler(self) -> bool:
        return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, self._no_handler)

    def _was_signalled(self) -> bool:
        """Whether the program has handled a SIGTERM from a job manager, which signals all processes of a rank."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._signals, 4096) and self._has_handler()
        return False


def _wait(store: Store, keys: list[str]) -> None:
    while True:
        try:
            return store.wait(keys, WAIT_PERIOD)
        except DistStoreError:  # not yet
            continue
