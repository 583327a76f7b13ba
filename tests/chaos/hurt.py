"""Carries out one event on a job's ranks."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import psutil

from tests.chaos.plan import Event
from tests.chaos.ranks import Keeper

WORKER_WAIT = 15.0  # a rank that is to lose its worker may have none: it backs off, or was just started
START_WAIT = 20.0
LEAVE_WAIT = 40.0  # DRAIN_TIMEOUT and some
SLOW_FSYNC = 3.0  # seconds that each takes on a slow disk; a generation's number takes two


class SoakError(Exception):
    """The job did not do what it must; the text says what."""


@dataclass
class Strike:
    """An event that was carried out: harm was done at `at` (of two kills, the second) and lasted until `over`."""

    event: Event
    at: float
    over: float
    note: str = ""
    disturbed: bool = False  # another event overlaps with it: its times are not its own
    settled: float = 0.0  # when the job trained again, or the next event came
    whole: float | None = None  # when all ranks were members again


class Field(Protocol):
    """Where events happen."""

    keeper: Keeper

    def join(self, name: str) -> None: ...
    def cut(self, name: str) -> None: ...
    def heal(self, name: str) -> None: ...
    def slow_disk(self, name: str, seconds: float) -> None: ...


def strike(event: Event, field: Field) -> Strike:
    """Do what `event` says; returns when the harm is over. Raises SoakError where a rank does not do as it must."""
    keeper, name = field.keeper, event.ranks[0]
    note = ""
    match event.kind:
        case "kill worker":
            at, note = _kill_worker(keeper, name)
        case "kill supervisor":
            at = keeper.signal_supervisor(name, signal.SIGKILL)
        case "kill rank" | "kill two" | "kill all":
            at = keeper.kill(*event.ranks)
        case "kill starting":
            at = keeper.kill(name)
            wait(lambda: keeper.ranks[name].starts[-1] > at, f"{name} to be started again", START_WAIT)
            time.sleep(event.seconds)  # what the event is: some way into the start
            at = keeper.kill(name)
        case "kill recovering":
            at, note = _kill_worker(keeper, name)
            time.sleep(event.seconds)  # what the event is: some way into the recovery
            again = keeper.signal_worker(name, signal.SIGKILL)
            at = again[0] if again else keeper.kill(name)
        case "stop worker" | "stop supervisor" | "stop rank" | "cut":
            with _silence(event, field) as (at, note):
                time.sleep(event.seconds)
        case "slow disk":
            at, note = _slow_disk(event, field)
        case "drain" | "leave":
            at = _ask_to_leave(keeper, name, for_good=event.kind == "leave")
        case "join":
            at = time.monotonic()
            field.join(name)
        case _:
            raise ValueError(event.kind)
    return Strike(event, at, time.monotonic(), note)


def wait(condition: Callable[[], object], what: str, timeout: float) -> None:
    """Wait until `condition()` is true. Raises SoakError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise SoakError(f"not within {timeout:g} s: {what}")
        time.sleep(0.02)  # the period of looking


def _worker(keeper: Keeper, name: str, number: int) -> tuple[float, psutil.Process] | None:
    """Signal a rank's worker, once there is one; None where there is none for long."""
    end = time.monotonic() + WORKER_WAIT
    while (found := keeper.signal_worker(name, number)) is None and time.monotonic() < end:
        time.sleep(0.02)  # the period of looking
    return found


def _kill_worker(keeper: Keeper, name: str) -> tuple[float, str]:
    found = _worker(keeper, name, signal.SIGKILL)
    return (found[0], "") if found else (time.monotonic(), "it had no worker")


def _slow_disk(event: Event, field: Field) -> tuple[float, str]:
    """The rank's worker is killed, and the next generation has to start on a slow disk."""
    name = event.ranks[0]
    field.slow_disk(name, SLOW_FSYNC)
    try:
        done = _kill_worker(field.keeper, name)
        time.sleep(event.seconds)
    finally:
        field.slow_disk(name, 0.0)
    return done


@contextlib.contextmanager
def _silence(event: Event, field: Field) -> Iterator[tuple[float, str]]:
    """The rank, or a part of it, says nothing for as long as the body takes."""
    keeper, name, note = field.keeper, event.ranks[0], ""
    undo: Callable[[], object]
    match event.kind:
        case "stop worker":
            if found := _worker(keeper, name, signal.SIGSTOP):
                at, worker = found
                undo = lambda: worker.send_signal(signal.SIGCONT)  # noqa: E731
            else:
                at, note, undo = time.monotonic(), "it had no worker", lambda: None
        case "stop supervisor":
            at = keeper.signal_supervisor(name, signal.SIGSTOP)
            undo = lambda: keeper.signal_supervisor(name, signal.SIGCONT)  # noqa: E731
        case "stop rank":
            at = keeper.signal_rank(name, signal.SIGSTOP)
            undo = lambda: keeper.signal_rank(name, signal.SIGCONT)  # noqa: E731
        case _:
            at = time.monotonic()
            field.cut(name)
            undo = lambda: field.heal(name)  # noqa: E731
    try:
        yield at, note
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # a silent worker is ended
            undo()


def _ask_to_leave(keeper: Keeper, name: str, for_good: bool) -> float:
    # the event before may have killed it a moment ago
    wait(lambda: keeper.ranks[name].running, f"{name} to be started again", START_WAIT)
    before = len(keeper.exits)
    at = keeper.leave(name) if for_good else keeper.signal_supervisor(name, signal.SIGTERM)
    wait(lambda: any(ended.rank == name for ended in keeper.exits[before:]), f"{name} to leave on SIGTERM", LEAVE_WAIT)
    return at
