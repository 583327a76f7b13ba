"""The process that workers are forked from: it imports torch once, and never uses CUDA or RPC."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import select
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

import psutil

from rolecall import config
from rolecall.errors import UsageError
from rolecall.rank import descendants

MAIN = "rolecall.rank.worker"  # a name: it imports torch, which the supervisor must not load
ADOPTING = "rolecall.rank.adopting"  # a name: its import makes a fork server of a process
KILL = 5.0  # seconds for a killed process to end
MAIN_TAKES = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
SLICE = 0.5  # seconds: longer pauses of this process do not count as waiting
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([ADOPTING])
spared = set[int]()  # children of this process that do not belong to it
_alive_fd = -1  # while this process has it open, the fork server runs
_forked = 0  # the process that has forked: its imports are behind it


class ForkError(Exception):
    """No worker was forked; says why. `killed`: somebody else killed the fork server."""

    def __init__(self, problem: str, killed: bool = False) -> None:
        super().__init__(problem)
        self.killed = killed


def prepare_imports() -> None:
    """Sets what torch reads where it is imported."""
    # torch warns of every peer that ends; and `set_num_threads` counts where it is called, not in RPC's threads
    config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")


def prepare(preload: tuple[str, ...], imported: bool = False) -> None:
    """Starts it, unless it runs: as a fork of this process, where that has `imported` torch and has one thread. Raises
    UsageError where TMPDIR cannot hold its socket.
    """
    prepare_imports()
    modules = [ADOPTING, MAIN, *preload]
    context.set_forkserver_preload(modules)
    try:
        # later versions of Python have another `main`
        if imported and [*inspect.signature(multiprocessing.forkserver.main).parameters] == MAIN_TAKES:
            _fork_here(modules)
        else:
            _ensure_running()
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
                importlib.import_module(ADOPTING).end()
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
    _keep_alive_fd(server)


def _ensure_running() -> None:
    server: Any = multiprocessing.forkserver._forkserver
    before = server._forkserver_pid
    server.ensure_running()
    if server._forkserver_pid != before:
        _keep_alive_fd(server)


def _keep_alive_fd(server: Any) -> None:
    """Keeps the pipe whose end tells the fork server to end from workers, which are passed another file instead: what
    they start might hold it for ever."""
    global _alive_fd
    if _alive_fd >= 0:
        os.close(_alive_fd)
    _alive_fd, server._forkserver_alive_fd = server._forkserver_alive_fd, os.open(os.devnull, os.O_RDONLY)


def _start(process: Any) -> None:
    _ensure_running()
    process.start()


def has_forked() -> bool:
    """Whether it has forked a worker; one that is new imports the job's modules first."""
    return _forked != 0 and _forked == _pid()


async def fork(process: Any, limit: float) -> None:
    """Starts `process`. Raises ForkError, also where there is no answer for `limit` seconds: the fork server is killed
    then, and the next fork starts another one.
    """
    global _forked
    # in a thread: the first fork waits for the imports
    forking = asyncio.ensure_future(asyncio.to_thread(_start, process))
    forking.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # whoever waits may have been cancelled
    answered = await within(forking, limit)
    if not answered:
        await _kill()  # the thread reads the end of its pipe then
    try:
        await forking
    except (OSError, EOFError) as error:
        if not answered:
            raise ForkError(f"the fork server did not answer for {limit:g} s") from error
        signalled = await asyncio.to_thread(_killed_by)
        if signalled:
            problem = f"the fork server was killed by {signal.Signals(signalled).name}"
        else:
            problem = str(error) or type(error).__name__
        raise ForkError(problem, signalled == signal.SIGKILL) from error
    _forked = _pid()


def _killed_by() -> int:
    """The signal that ended the fork server, which is about to have ended: its connection broke; 0 for an exit."""
    try:
        pidfd = os.pidfd_open(_pid())
    except OSError:  # there is none
        return 0
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * KILL)
        # left as it is: the next fork looks for its end
        status = os.waitid(os.P_PID, _pid(), os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # somebody has waited for it
        return 0
    finally:
        os.close(pidfd)
    return status.si_status if status and status.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0


async def _kill() -> None:
    """Kills the fork server, and waits for its end: until then it looks as if it ran."""
    if server := _pid():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            ended = asyncio.to_thread(os.waitid, os.P_PID, server, os.WEXITED | os.WNOWAIT)
            await within(asyncio.ensure_future(ended), KILL)


def _pid() -> int:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None) or 0


def clear() -> None:
    """Kills what an ended worker has left behind: all below the fork server. No worker may run."""
    if server := _pid():
        descendants.kill(server)


def end() -> None:
    """Kills it, and all below it: it takes half a second to end, and readers of this process's output wait for it."""
    clear()
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
