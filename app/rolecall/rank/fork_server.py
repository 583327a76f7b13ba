"""The process that workers are forked from: it imports torch once, and never uses CUDA or RPC."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

import psutil

from rolecall import config
from rolecall.config import UsageError

MAIN = "rolecall.rank.worker"  # a name: it imports torch, which the supervisor must not load
FIRST = "rolecall.rank.fork_server_process"  # what it imports before all else
KILL = 5.0  # seconds for a killed process to end
MAIN_TAKES = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
SLICE = 0.5  # seconds: longer pauses of this process do not count as waiting
context = multiprocessing.get_context("forkserver")
spared = set[int]()  # children of this process that do not belong to it
_forked = 0  # the process that has forked: its imports are behind it


class ForkError(Exception):
    """No worker was forked; says why."""


def prepare_imports() -> None:
    """Sets what torch reads where it is imported."""
    # torch warns of every peer that ends; and `set_num_threads` counts where it is called, not in RPC's threads
    config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")


def prepare(preload: tuple[str, ...], imported: bool = False) -> None:
    """Starts it, unless it runs: as a fork of this process, where that has `imported` torch and has one thread. Raises
    UsageError where TMPDIR cannot hold its socket.
    """
    prepare_imports()
    modules = [FIRST, MAIN, *preload]
    context.set_forkserver_preload(modules)
    try:
        # later versions of Python have another `main`
        if imported and [*inspect.signature(multiprocessing.forkserver.main).parameters] == MAIN_TAKES:
            _fork_here(modules)
        else:
            multiprocessing.forkserver.ensure_running()
    except OSError as error:
        # its socket lies in the temporary directory, and a socket's path has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()}: the fork server cannot start there ({error})") from error


def _fork_here(modules: list[str]) -> None:
    """What `ensure_running` does, with a fork instead of another interpreter."""
    server: Any = multiprocessing.forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            try:
                multiprocessing.forkserver.main(listener.detach(), alive, modules)
            except Exception:  # of a module of the user's
                traceback.print_exc()
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid


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
            if child.pid not in spared:
                child.kill()


async def within(waiting: asyncio.Future[Any], seconds: float) -> bool:
    """Waits until `waiting` is done, for `seconds` at most. While this process is suspended no time passes."""
    left = seconds
    while not waiting.done() and left > 0:
        await asyncio.wait({waiting}, timeout=min(left, SLICE))
        left -= SLICE
    return waiting.done()
