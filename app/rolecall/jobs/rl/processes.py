"""Plays groups of episodes in forked processes, a new one for each group: most environments hold Python's lock.

A fork has the settings, the weights and the registered environments, and starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from rolecall import ProgramError, UsageError
from rolecall.jobs.rl.stepping import HANG_EXIT_CODE, BrokenEnvError
from rolecall.jobs.support import explain

CHECK_SECONDS = 1.0  # between two checks for a process that has died
STOP_SECONDS = 5.0  # limit for all processes to close their environments
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CONTEXT = multiprocessing.get_context("fork")
T = TypeVar("T")
Advance = Callable[[float], None]  # reports that so many more episodes have ended
OnHang = Callable[[str], None]


class _Advanced(NamedTuple):
    episodes: float


class _Result(NamedTuple):
    value: Any


class _Running(NamedTuple):
    group: range
    process: Any  # a multiprocessing.Process


def play_each(
    groups: list[range], at_once: int, play: Callable[[range, Advance, OnHang], T], advance: Advance
) -> Generator[tuple[range, T], None, None]:
    """Calls `play` with each group of numbers of episodes, in up to `at_once` processes; yields the results as they
    come. No process is left when the iterator ends or is closed.

    Raises what `play` raises as UsageError or ProgramError, and BrokenEnvError if an environment hangs or a process
    dies. `play` itself limits the time of a step.
    """
    waiting, running = deque(groups), dict[Connection, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                # an interrupt in between would leave a process that nobody ends
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    receiver, started = _start(waiting.popleft(), play)
                    running[receiver] = started
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            wait(list(running), CHECK_SECONDS)
            for receiver, started in list(running.items()):
                match _receive(receiver, started):
                    case None:
                        pass
                    case _Advanced(episodes):
                        advance(episodes)
                    case _Result(value):
                        del running[receiver]
                        receiver.close()
                        started.process.join(STOP_SECONDS)
                        _stop([started.process])
                        yield started.group, value
                    case error:
                        raise error
    finally:
        _stop([each.process for each in running.values()])


def _start(group: range, play: Callable[[range, Advance, OnHang], Any]) -> tuple[Connection, _Running]:
    receiver, sender = CONTEXT.Pipe(duplex=False)
    # no daemon: environments may start processes of their own
    process = CONTEXT.Process(target=_work, args=(sender, group, play))
    process.start()
    sender.close()  # so that the process's end ends the pipe
    return receiver, _Running(group, process)


def _receive(receiver: Connection, sent_by: _Running) -> Any:
    """The next message of a process, None if there is none yet, or an error if it has died."""
    alive = sent_by.process.is_alive()  # if its own processes are alive, they hold the pipe open
    with suppress(EOFError, OSError):  # OSError: in the middle of a message
        if receiver.poll():
            return receiver.recv()
        if alive:
            return None
    sent_by.process.join(STOP_SECONDS)
    code, group = sent_by.process.exitcode, sent_by.group
    how = f"exited with code {code}; --envs 1 plays them one group after the other"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}; if memory is short, give fewer --envs"
    return BrokenEnvError(f"the process of episodes {group.start} to {group.stop - 1} {how}")


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


# ---- in the process


def _work(sender: Connection, group: range, play: Callable[[range, Advance, OnHang], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # if the parent is killed

    def advance(episodes: float) -> None:
        if episodes:
            sender.send(_Advanced(episodes))

    def on_hang(line: str) -> None:
        sender.send(BrokenEnvError(line))
        os._exit(HANG_EXIT_CODE)

    with suppress(KeyboardInterrupt, BrokenPipeError):  # the parent has ended this process, or is dead
        sender.send(_outcome(lambda: play(group, advance, on_hang)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outcome(play: Callable[[], Any]) -> Any:
    try:
        return _Result(play())
    except BrokenPipeError:
        raise
    except ProgramError as error:
        return error
    except UsageError as error:
        return UsageError(explain(error))
    except Exception as error:  # its traceback cannot be sent
        return ProgramError(explain(error))
