"""How the program ends in every rank: by returning, or by SIGTERM, which rank 0 passes on when a drain is ordered.

The ranks tell each other in the generation's store.
"""

from __future__ import annotations

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
PERIOD = timedelta(minutes=10)  # of a wait that has no deadline: the gang ends the process
PATIENCE = 0.75  # fraction of DRAIN_TIMEOUT after which a program that SIGTERM does not end is left alone


class Ending:
    """The end of this rank's program, and of the others'. From now on a drain is SIGTERM for the program.

    Raises torch's DistError where rank 0's worker is gone.
    """

    def __init__(self, context: Context[ScriptSettings]) -> None:
        self._context, self._rank, self._world_size = context, context.me.rank, len(context.members)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = False  # SIGTERM has reached the program
        self._over = threading.Event()
        self._store, waiting = (PrefixStore("ending", context.store.clone()) for _ in range(2))
        threading.Thread(target=self._obey_drain, args=(waiting,), name="drain", daemon=True).start()

    def end(self) -> bool:
        """The program of this rank has ended. Returns False where that was known."""
        with self._lock:
            if self._over.is_set():
                return False
            self._store.set(f"ended-{self._rank}", STOPPED if self._stopped else RETURNED)
            self._over.set()
            return True

    @property
    def has_ended(self) -> bool:
        """Whether the program of this rank has ended, by itself or by SIGTERM."""
        return self._over.is_set()

    def summary(self) -> dict[str, Any] | None:
        """Waits until the program has ended in every rank. None where SIGTERM has ended one: the job has drained."""
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
        except DistError:  # rank 0's worker is gone, and the gang ends this one
            return

    def _stop(self) -> None:
        """SIGTERM. A program without a handler ends there and then, one with a handler in its own time; what it still
        does after that, until its process is killed when all ranks' programs have ended, does not count.
        """
        with self._lock:
            if self.has_ended:
                return
            self._stopped = True
        self._context.logger.info("SIGTERM to the program")
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
            seconds = PATIENCE * self._context.settings.drain_timeout
            if not self._over.wait(seconds):
                self._context.logger.warning("the program did not end after SIGTERM", seconds=seconds)
        if self.end() and self._rank == 0:
            self._context.conclude(self.summary())


def _wait(store: Store, keys: list[str]) -> None:
    while True:
        try:
            return store.wait(keys, PERIOD)
        except DistStoreError:  # not yet
            continue
