"""The zygote of `rolecall run`: the standard library's fork server, which imports torch once and forks the ranks.

A forked rank shares the imported modules, so all ranks of one machine start in the time of one. The zygote imports no
user's file. It exits when `rolecall run` exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing.context
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker  # undocumented: `ensure_running`, so that it starts with SIGINT blocked
from multiprocessing.reduction import DupFd  # undocumented: passes a file descriptor to the forked process
from pathlib import Path
from typing import Any

from rolecall import config
from rolecall.declare import describe, registry
from rolecall.errors import FAILED
from rolecall.rank import fork_server

START_SECONDS = 120.0  # until a fork answers: the import of torch alone takes several seconds on a busy machine
STATUS_SECONDS = 2.0  # until the zygote reports that a process has exited
PROGRAM = "rolecall.__main__"  # a name: it imports this module
PRELOAD = ["rolecall.rank.zygote_main", fork_server.MAIN, "rolecall.rank.start", PROGRAM]
LOST = 255  # the exit code that `multiprocessing` reports if the fork server has died
parent = 0  # the zygote's process ID, in a process that it has forked


class ZygoteError(Exception):
    """The zygote has ended or does not answer."""


class Forked:
    """A process that the zygote has forked, as its starter sees it. It leads a session, so its process group has its
    process ID. `lock` serializes the use of `process`, whose exit code `multiprocessing` reads from the zygote."""

    def __init__(self, process: multiprocessing.context.ForkServerProcess, lock: threading.Lock) -> None:
        self._process, self._lock = process, lock
        self.pid: int = process.pid  # type: ignore[assignment]
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Waits for its exit. Returns the exit code, negative for a signal.

        If the process has exited and the zygote does not report it, the zygote is suspended: it is continued, and
        killed if that does not help.
        """
        with contextlib.suppress(ProcessLookupError):  # the zygote has reaped the process
            pidfd = os.pidfd_open(self.pid)
            try:
                await _readable(self._process.sentinel, pidfd)
            finally:
                os.close(pidfd)
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_readable(self._process.sentinel), STATUS_SECONDS)
                break
            fork_server.signal_server(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_readable(self._process.sentinel), fork_server.KILL_SECONDS)
            return self.wait_for(0)
        self.returncode = -signal.SIGKILL  # its exit code is lost with a zygote that even SIGKILL does not end
        return self.returncode

    def wait_for(self, seconds: float) -> int:
        """Waits without an event loop. Raises TimeoutError."""
        if self.returncode is None:
            if not _poll(self._process.sentinel, seconds):
                raise TimeoutError
            with self._lock:
                self.returncode = self._process.exitcode
                if self.returncode is not None:
                    self._process.close()  # its two descriptors would wait for a collection
            if self.returncode is None or (self.returncode == LOST and self.kill()):
                self.returncode = -signal.SIGKILL  # its successor uses the same ports
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> bool:
        """Kills its process group and waits for its exit. Returns whether it was running."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        _poll(pidfd, fork_server.KILL_SECONDS)
        os.close(pidfd)
        return True


class Zygote:
    """Starts the zygote, preloaded for the built-in jobs among `targets`. As a context manager, ends it.

    With `withheld`, it is a fork of this process, which has one thread, without these file descriptors: what this
    process has imported is not imported again. Otherwise it is another interpreter.

    A process has one zygote: `multiprocessing` has one fork server. Raises UsageError if TMPDIR cannot hold its socket.
    """

    def __init__(self, *targets: str, withheld: Sequence[int] | None = None) -> None:
        self._preload = [*PRELOAD]
        for target in targets:
            if target in registry.JOBS:
                self._preload += [name for role in registry.get(target).roles for name in role.preload]
                self._preload.append(registry.module_of(target).__name__)
        self._lock, self._ended = threading.Lock(), False
        with self._lock, fork_server.checked_tmpdir():
            self._start(lambda: None, withheld)

    def _start(self, then: Callable[[], None], withheld: Sequence[int] | None = None) -> None:
        """Starts the zygote unless it runs, and calls `then`. The caller holds the lock."""
        self._check()
        resource_tracker.ensure_running()  # before the zygote, which unblocks SIGINT once it ignores it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _without_working_directory():
                if withheld is None:
                    fork_server.ensure_running(self._preload)
                else:
                    fork_server.start_as_fork(self._preload, withheld)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._check()  # this may have replaced the one that `end` killed meanwhile
        then()

    def _check(self) -> None:
        """Kills a zygote that runs after `end`. Raises OSError."""
        if self._ended:
            fork_server.signal_server(signal.SIGKILL)
            raise OSError("it has ended")

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills the zygote. The processes that it has forked exit when their parent does."""
        self._ended = True
        fork_server.signal_server(signal.SIGKILL)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        """Forks `rolecall ARGUMENTS` with `environment`. Waits for the zygote's imports. Raises ZygoteError."""
        command = Command(list(arguments), dict(environment), str(Path.cwd()), stdout, stderr)
        process = fork_server.context.Process(target=command)
        deadline = threading.Timer(START_SECONDS, fork_server.signal_server, (signal.SIGKILL,))
        with self._lock:
            deadline.start()
            try:
                self._start(process.start)
            except (OSError, EOFError) as error:
                raise ZygoteError(f"it has ended, or did not answer for {START_SECONDS:g} s ({error})") from error
            finally:
                deadline.cancel()
        return Forked(process, self._lock)

    def call(self, arguments: Sequence[str], seconds: float) -> int:
        """Runs `rolecall ARGUMENTS`, without the zygote if it has ended. Returns the exit code. Raises TimeoutError
        after `seconds`.
        """
        try:
            forked = self.fork(arguments, config.child_environment(), sys.stdout.fileno(), sys.stderr.fileno())
        except ZygoteError:
            return describe.call(arguments, seconds)
        try:
            return forked.wait_for(seconds)
        finally:
            if forked.returncode is None:
                forked.kill()


class Command:
    """A command line of Rolecall, pickled for the forked process that runs it. `stdout` and `stderr` are file
    descriptors of the starter, and `DupFd`s in the forked process."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], directory: str, stdout: int, stderr: int
    ) -> None:
        self.arguments, self.environment, self.directory = arguments, environment, directory
        self.stdout, self.stderr = stdout, stderr

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stdout": DupFd(self.stdout), "stderr": DupFd(self.stderr)}

    def __call__(self) -> None:
        """Runs it, and exits."""
        global parent
        parent = os.getppid()
        from rolecall.rank import zygote_main

        gc.freeze()  # a collection would copy every page that is shared with the zygote
        gc.enable()
        os.setsid()  # a process group that lost its leader and has a suspended member gets SIGHUP
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for source, number in ((self.stdout, 1), (self.stderr, 2)):
            fd = source.detach()  # type: ignore[attr-defined]
            os.dup2(fd, number)
            os.close(fd)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.chdir(self.directory)
        sys.path[:] = zygote_main.SYS_PATH
        config.replace_environment(self.environment)
        tempfile.tempdir = None  # TMPDIR may differ
        code = FAILED
        try:
            code = importlib.import_module(PROGRAM).main(self.arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # at its exit, an interpreter tears torch down, slowly


@contextlib.contextmanager
def _without_working_directory() -> Iterator[None]:
    """Within the block, the path of a fork server that starts does not begin with the working directory, whose modules
    may replace no library's: it goes by the variable, and in later releases of Python by the path of this process.
    """
    first = sys.path.pop(0) if not sys.flags.safe_path and sys.path[:1] in ([""], [str(Path.cwd())]) else None
    try:
        with config.exported_for_a_moment(PYTHONSAFEPATH="1"):
            yield
    finally:
        if first is not None:
            sys.path.insert(0, first)


def _poll(fd: int, seconds: float) -> bool:
    """Whether `fd` becomes readable, or reaches its end, within `seconds`; `select` handles fds below 1,024 only."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


async def _readable(*fds: int) -> None:
    """Waits until one of `fds` is readable or at its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    for fd in fds:
        loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        for fd in fds:
            loop.remove_reader(fd)
