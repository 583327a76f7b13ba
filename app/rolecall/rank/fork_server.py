"""The process that workers are forked from: it imports torch once, and never uses CUDA or RPC."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
from typing import Any

import psutil

from rolecall import config
from rolecall.config import UsageError

MAIN = "rolecall.rank.worker"  # a name: it imports torch, which the supervisor must not load
KILL = 5.0  # seconds for a killed process to end
SLICE = 0.5  # seconds: longer pauses of this process do not count as waiting
context = multiprocessing.get_context("forkserver")
_forked = 0  # the process that has forked: its imports are behind it


class ForkError(Exception):
    """No worker was forked; says why."""


def prepare(preload: tuple[str, ...]) -> None:
    """Starts it, unless it runs. Raises UsageError where TMPDIR cannot hold its socket."""
    # torch warns of every peer that ends; and `set_num_threads` counts where it is called, not in RPC's threads
    config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
    context.set_forkserver_preload([MAIN, *preload])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:
        # its socket lies in the temporary directory, and a socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()}: the fork server cannot start there ({error})") from error


def has_forked() -> bool:
    """Whether it has forked a worker; one that is new imports the job's modules first."""
    return _forked != 0 and _forked == _pid()


async def fork(process: Any, limit: float) -> None:
    """Starts `process`. Raises ForkError, also where there is no answer for `limit` seconds: the fork server is killed
    then, and the next fork starts another one.
    """
    global _forked
    # in a thread: the first fork waits for the imports
    forking = asyncio.ensure_future(asyncio.to_thread(process.start))
    forking.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # whoever waits may have been cancelled
    answered = await within(forking, limit)
    if not answered:
        await _kill()  # the thread reads the end of its pipe then
    try:
        await forking
    except (OSError, EOFError) as error:
        problem = str(error) or type(error).__name__
        raise ForkError(problem if answered else f"the fork server did not answer for {limit:g} s") from error
    _forked = _pid()


async def _kill() -> None:
    """Kills the fork server, and waits for its end: until then it looks as if it ran."""
    if server := _pid():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            ended = asyncio.to_thread(os.waitid, os.P_PID, server, os.WEXITED | os.WNOWAIT)
            await within(asyncio.ensure_future(ended), KILL)


def _pid() -> int:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None) or 0


def end() -> None:
    """Kills it: it takes half a second to end, and readers of this process's output wait for it."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


async def within(waiting: asyncio.Future[Any], seconds: float) -> bool:
    """Waits until `waiting` is done, for `seconds` at most. While this process is suspended no time passes."""
    left = seconds
    while not waiting.done() and left > 0:
        await asyncio.wait({waiting}, timeout=min(left, SLICE))
        left -= SLICE
    return waiting.done()
