"""The process that workers are forked from: it imports torch once, and never uses CUDA or RPC. The zygote of `rolecall
run`, from which ranks are forked, is one too."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker  # undocumented: `ensure_running`, so that it starts with SIGINT blocked
from pathlib import Path
from typing import Any

import psutil

from rolecall import config
from rolecall.errors import UsageError
from rolecall.rank import descendants

MAIN = "rolecall.rank.worker"  # a name: it imports torch, which the supervisor must not load
ADOPTING = "rolecall.rank.adopting"  # a name: its import prepares a process to be the fork server
KILL_SECONDS = 5.0  # until a killed process has exited
MAIN_PARAMETERS = {"listener_fd", "alive_r", "preload", "main_path", "sys_path", "sys_argv", "authkey_r"}
KEY_BYTES = 32  # of the key by which the fork server knows its clients
SLICE_SECONDS = 0.5  # longer pauses of this process do not count as waiting
context = multiprocessing.get_context("forkserver")
spared = set[int]()  # children of this process that `end` does not kill
# The public API has neither the fork server's process ID, nor its pipe, nor a fork instead of a new interpreter. Used:
# `_forkserver` (the one server of this process), its `_forkserver_pid` (to signal it, to wait for it, and to find what
# workers leave behind), `_forkserver_address` and `_forkserver_alive_fd` (set by `start_as_fork`, withheld from workers
# by `_keep_alive_fd`), `_forkserver_authkey` (from Python 3.14 on; set by `start_as_fork`), and `main` (run by
# `start_as_fork`, if it has no other parameters than MAIN_PARAMETERS, of which later releases have added the last two).
_server: Any = multiprocessing.forkserver._forkserver
_imported: list[str] = []  # by the running fork server
_alive_fd = -1  # the fork server runs while this process has it open
_workers = set[int]()  # process IDs of the workers that have not ended
lock = threading.Lock()  # held until a new process is in `_workers`, by `clear`, and to read an exit code
_forked = 0  # the process ID of a fork server that has forked, and so has finished its imports


@dataclass
class Kind:
    """A kind of fork server: it imports `preload`. If it is `isolated`, no module of the working directory replaces one
    of a library; once it is `retired`, it is not started any more."""

    preload: Sequence[str]
    isolated: bool = False
    retired: bool = False


class ForkError(Exception):
    """No worker was forked. `killed`: another process killed the fork server."""

    def __init__(self, problem: str, killed: bool = False) -> None:
        super().__init__(problem)
        self.killed = killed


_of_workers = Kind([ADOPTING])


def prepare(preload: Sequence[str], imported: bool = False) -> None:
    """Starts the fork server of a rank's workers, as `begin` does."""
    _of_workers.preload = [ADOPTING, MAIN, *preload]
    begin(_of_workers, imported)


def begin(kind: Kind, imported: bool = False, withheld: Sequence[int] = ()) -> None:
    """Starts the fork server unless it runs: as a fork of this process, without its file descriptors `withheld`, if
    that has `imported` torch and has one thread. Raises UsageError if TMPDIR cannot hold its socket.
    """
    # torch warns of every peer that ends; and `set_num_threads` affects the calling thread, not RPC's threads
    config.export_default(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1")
    try:
        with _shielded() if kind.isolated else contextlib.nullcontext():
            if imported:
                start_as_fork(kind.preload, withheld)
            else:
                ensure_running(kind.preload)
    except OSError as error:  # the path of a socket, which is in TMPDIR, has at most 107 characters
        raise UsageError(f"TMPDIR={tempfile.gettempdir()}: the fork server cannot start there ({error})") from error


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Within the block, an isolated fork server that starts takes no SIGINT before it ignores that, and its path does
    not begin with the working directory: it goes by the variable, and in later releases of Python by this one's path.
    """
    resource_tracker.ensure_running()  # before the fork server, which unblocks SIGINT once it ignores it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    here = not sys.flags.safe_path and sys.path[:1] in ([""], [str(Path.cwd())])
    first = sys.path[:1] if here else []
    del sys.path[: len(first)]
    try:
        with config.exported_for_a_moment(PYTHONSAFEPATH="1"):
            yield
    finally:
        sys.path[:0] = first
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_as_fork(preload: Sequence[str], withheld: Sequence[int] = ()) -> None:
    """Starts the fork server as a fork of this process, which has one thread; not with its file descriptors `withheld`.
    The first module of `preload` has a function `end`, which the fork server calls last. Raises OSError."""
    global _imported
    parameters = inspect.signature(multiprocessing.forkserver.main).parameters
    if not MAIN_PARAMETERS.issuperset(parameters):
        ensure_running(preload)  # a later version of Python, with another `main`
        return
    _imported = [*preload]
    with socket.socket(socket.AF_UNIX) as listener:
        address = tempfile.mktemp(prefix=f"fork-server-{os.getpid()}-")
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive, ours = os.pipe()
        key = os.urandom(KEY_BYTES)
        options: dict[str, Any] = {"authkey_r": readable(key)} if "authkey_r" in parameters else {}
        pid = os.fork()
        if not pid:
            for descriptor in (ours, *withheld):
                os.close(descriptor)
            try:
                multiprocessing.forkserver.main(
                    listener_fd=listener.detach(), alive_r=alive, preload=_imported, **options
                )
            except Exception:  # of a module of the user's
                traceback.print_exc()
            finally:
                importlib.import_module(_imported[0]).end()
                os._exit(0)
    for descriptor in (alive, *options.values()):
        os.close(descriptor)
    _server._forkserver_address, _server._forkserver_alive_fd, _server._forkserver_pid = address, ours, pid
    _server._forkserver_authkey = key
    _keep_alive_fd()


def readable(content: bytes) -> int:
    """A file descriptor from which `content`, which fits into a pipe, is read."""
    ours, theirs = os.pipe()
    os.write(theirs, content)
    os.close(theirs)
    return ours


def ensure_running(preload: Sequence[str]) -> None:
    """Starts the fork server with `preload`, unless it runs. One that has imported something else is replaced.
    Raises OSError."""
    global _imported
    before = _server._forkserver_pid
    if before and _imported != preload:
        signal_server(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    _imported = [*preload]
    context.set_forkserver_preload([*preload])
    _server.ensure_running()
    if _server._forkserver_pid != before:
        _keep_alive_fd()


def _keep_alive_fd() -> None:
    """Withholds from forked processes the pipe whose end tells the fork server to exit: they could hold it for ever.
    They are passed another file instead."""
    global _alive_fd
    if _alive_fd >= 0:
        os.close(_alive_fd)
    _alive_fd, _server._forkserver_alive_fd = _server._forkserver_alive_fd, os.open(os.devnull, os.O_RDONLY)


def address() -> str:
    """The path of the fork server's socket."""
    return str(_server._forkserver_address)


def signal_server(number: int) -> None:
    """Sends a signal to the fork server, if it runs."""
    if server := server_pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, number)


def has_forked() -> bool:
    """Whether the fork server has forked a worker; a new one imports the job's modules first."""
    return _forked != 0 and _forked == server_pid()


def start(process: Any, limit: float, kind: Kind = _of_workers) -> None:
    """Starts `process`, and the fork server of that kind if it does not run. Raises ForkError. If that does not answer
    for `limit` seconds, in which this process is not suspended, it is killed, and the next start starts another one.
    """
    global _forked
    answered, late = threading.Event(), threading.Event()
    with lock:
        # not before: another start, with a deadline of its own, may have the lock until then
        threading.Thread(target=_limit, args=(limit, answered, late), daemon=True).start()
        try:
            _require(kind)
            process.start()  # waits for the imports
        except (OSError, EOFError) as error:
            number = _killed_by()
            if late.is_set():
                raise ForkError(f"the fork server did not answer for {limit:g} s") from error
            if number:
                problem = f"the fork server was killed by {signal.Signals(number).name}"
            else:
                problem = str(error) or type(error).__name__
            raise ForkError(problem, number == signal.SIGKILL) from error
        finally:
            answered.set()
        if kind is _of_workers:
            _workers.add(process.pid)
        _forked = server_pid()


def _limit(limit: float, answered: threading.Event, late: threading.Event) -> None:
    """Kills the fork server unless it has `answered` within `limit` seconds."""
    left = limit
    while left > 0:
        if answered.wait(min(left, SLICE_SECONDS)):
            return
        left -= SLICE_SECONDS
    late.set()
    signal_server(signal.SIGKILL)  # who waits for it reads the end of its pipe then


def _require(kind: Kind) -> None:
    """Starts the fork server unless it runs. Raises OSError if that is not possible, or if it has retired."""
    if not kind.retired:
        with _shielded() if kind.isolated else contextlib.nullcontext():
            ensure_running(kind.preload)
    if kind.retired:  # meanwhile, too
        signal_server(signal.SIGKILL)
        raise OSError("the fork server has ended")


def _killed_by() -> int:
    """Waits for the end of the fork server, whose connection broke: until then it appears to run. Returns the signal
    that has ended it; 0 for an exit, and if it runs or there is none."""
    try:
        pidfd = os.pidfd_open(server_pid())
    except OSError:  # there is none
        return 0
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * KILL_SECONDS)
        # not reaped: the next start does that
        status = os.waitid(os.P_PID, server_pid(), os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # reaped already
        return 0
    finally:
        os.close(pidfd)
    return status.si_status if status and status.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0


def server_pid() -> int:
    """The fork server's process; 0 before the first start."""
    return _server._forkserver_pid or 0


def clear(ended: int) -> None:
    """Kills what the worker `ended` has left behind: all processes below the fork server but the other workers and what
    is below them. If a fork takes longer than KILL_SECONDS, what is left is for the next call."""
    _workers.discard(ended)
    if not lock.acquire(timeout=KILL_SECONDS):
        return
    try:
        if server := server_pid():
            descendants.kill(server, frozenset(_workers))
    finally:
        lock.release()


def retire(kind: Kind) -> None:
    """Kills the fork server, also one that starts now, and lets it have no successor."""
    kind.retired = True
    signal_server(signal.SIGKILL)


def end() -> None:
    """Kills the fork server and all processes below it. Its own exit takes half a second, for which readers of this
    process's output would wait; the next start waits for it."""
    global _imported
    if server := server_pid():
        descendants.kill(server)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in spared:
                child.kill()
    _imported = []  # until it has exited, it appears to run


async def within(waiting: asyncio.Future[Any], seconds: float) -> bool:
    """Waits for at most `seconds` until `waiting` is done. While this process is suspended, no time passes."""
    left = seconds
    while not waiting.done() and left > 0:
        await asyncio.wait({waiting}, timeout=min(left, SLICE_SECONDS))
        left -= SLICE_SECONDS
    return waiting.done()
