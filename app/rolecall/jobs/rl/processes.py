"""Plays groups of episodes in forked processes: most environments hold Python's lock.

A fork has the settings, the weights and the registered environments, and starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from rolecall import ProgramError, UsageError
from rolecall.jobs.rl.stepping import HANG_EXIT_CODE, BrokenEnvError
from rolecall.jobs.support import explain

CHECK_SECONDS = 1.0  # between two checks for a process that has died
STOP_SECONDS = 5.0  # limit for all processes to close their environments
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CONTEXT = multiprocessing.get_context("fork")
T = TypeVar("T")
Play = Callable[[range, Callable[[str], None]], T]  # with a group of numbers of episodes, and an `on_hang` of `Envs`


def play_each(groups: list[range], count: int, play: Play[T]) -> Generator[tuple[range, T], None, None]:
    """Calls `play` with each group, in `count` processes; yields the results as they come. No process is left when the
    iterator ends or is closed.

    Raises what `play` raises as UsageError or ProgramError, and BrokenEnvError if an environment hangs or a process
    dies. `play` itself limits the time of a step.
    """
    running = dict[Connection, Any]()
    try:
        for number in range(count):
            with _uninterrupted():  # it would leave a process that nobody ends
                receiver, process = _start(groups[number::count], play)
                running[receiver] = process
        while running:
            wait(list(running), CHECK_SECONDS)
            for receiver, process in list(running.items()):
                alive = process.is_alive()  # if its own processes are alive, they hold the pipe open
                if alive and not receiver.poll():
                    continue
                message = _receive(receiver, process)
                if isinstance(message, Exception):
                    raise message
                if message is None:
                    process.join(STOP_SECONDS)
                    _stop([process])
                    del running[receiver]  # an interrupt before this line finds it
                else:
                    yield message
    finally:
        _stop(list(running.values()))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT waits for the end of the block, also if the system has another thread take it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield  # only Python's main thread is interrupted, by a handler of Python's
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _start(groups: list[range], play: Play[Any]) -> tuple[Connection, Any]:
    receiver, sender = CONTEXT.Pipe(duplex=False)
    # no daemon: environments may start processes of their own
    process = CONTEXT.Process(target=_work, args=(sender, groups, play))
    process.start()
    sender.close()  # so that the process's end ends the pipe
    return receiver, process


def _receive(receiver: Connection, process: Any) -> Any:
    """The next message of a process: a group and its result, an error (also if it has died), or None at the end."""
    with suppress(EOFError, OSError):  # OSError: in the middle of a message
        if receiver.poll():
            return receiver.recv()
    process.join(STOP_SECONDS)
    how = f"exited with code {process.exitcode}; --envs 1 plays them in this process"
    if process.exitcode is not None and process.exitcode < 0:
        how = f"was killed by {signal.Signals(-process.exitcode).name}; if memory is short, give fewer --envs"
    return BrokenEnvError(f"a process that plays episodes {how}")


def _stop(processes: list[Any]) -> None:
    """Ends processes, which close their environments if there is time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(STOP_SECONDS)


def _work(sender: Connection, groups: list[range], play: Play[Any]) -> None:
    """Runs in a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # if the parent is killed
    ending = False

    def on_hang(line: str) -> None:
        sender.send(BrokenEnvError(line))
        os._exit(HANG_EXIT_CODE)

    def on_sigterm(number: int, _: Any) -> None:
        """Ends the episodes once: what closes them, and what comes after them, is not interrupted."""
        nonlocal ending
        if not ending:
            ending = True
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt, BrokenPipeError):  # the parent has ended this process, or is dead
        signal.signal(signal.SIGTERM, on_sigterm)
        try:
            for group in groups:
                sender.send((group, play(group, on_hang)))
            sender.send(None)
        except ProgramError as error:
            sender.send(error)
        except Exception as error:  # its traceback cannot be sent
            kind = UsageError if isinstance(error, UsageError) else ProgramError
            sender.send(kind(explain(error)))
        ending = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
