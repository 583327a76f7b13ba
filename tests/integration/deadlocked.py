"""A job whose ranks wait for each other for ever, in the way that KIND says; with `lock`, worker_1 holds the GIL."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from rolecall import Context, Job, Role, Settings, remote

LOCK = threading.Lock()
CALLS = 64  # that a worker carries out at a time


class Deadlocked(Settings):
    """Settings of the job."""

    kind: str = "lock"
    workers: int = 2


class Lead:
    """Rank 0's: holds a lock while it calls worker_0, which calls back; or has all its threads taken by calls."""

    def __init__(self, context: Context[Deadlocked]) -> None:
        self.context, self.meet = context, threading.Barrier(CALLS)

    def run(self) -> None:
        """Deadlocks."""
        context = self.context
        if context.settings.kind == "lock":
            with LOCK:
                context.wait_all([context.call("worker_0", Worker.ask_back)])
        context.wait_all([context.call("worker_0", Worker.crowd)])

    @remote
    def take_lock(self) -> int:
        """Waits for the lock that the main thread holds."""
        with LOCK:
            return 1

    @remote
    def ask_worker(self) -> int:
        """Waits for a worker, in one of the threads that its own call back needs."""
        self.meet.wait()
        return self.context.call("worker_1", Worker.ask_rank_0).result()

    @remote
    def rank(self) -> int:
        """Answers at once, if there is a thread for it."""
        return 0


class Worker:
    """A worker's."""

    def __init__(self, context: Context[Any]) -> None:
        self.context = context

    @remote
    def ask_back(self) -> int:
        """At worker_0: calls the lead while that waits for it; another thread waits for worker_1."""
        threading.Thread(target=self.ask_aside, daemon=True).start()
        return self.context.call("lead_0", Lead.take_lock).result()

    def ask_aside(self) -> None:
        """In another thread: waits for worker_1."""
        self.context.wait_all([self.context.call("worker_1", Worker.hold_the_gil)])

    @remote
    def crowd(self) -> list[int]:
        """At worker_0: has more of the lead's methods call back than the lead has threads for."""
        return self.context.wait_all([self.context.call("lead_0", Lead.ask_worker) for _ in range(CALLS)])

    @remote
    def ask_rank_0(self) -> int:
        """Calls the lead."""
        return self.context.call("lead_0", Lead.rank).result()

    @remote
    def hold_the_gil(self) -> None:
        """At worker_1: waits in C for ever, and lets no other thread run."""
        while True:
            ctypes.PyDLL(None).sleep(600)


JOB = Job([Role("lead", Lead), Role("worker", Worker, count="workers", minimum=2)], settings=Deadlocked)
