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
import traceback
from collections.abc import Mapping, Sequence
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


class Forked:
    """A process that the zygote has forked, as its starter sees it. It leads a session, so its process group has its
    process ID."""

    def __init__(self, process: multiprocessing.context.ForkServerProcess) -> None:
        self._process = process
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
            with fork_server.lock:
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
        preload = [*PRELOAD]
        for target in targets:
            if target in registry.JOBS:
                preload += [name for role in registry.get(target).roles for name in role.preload]
                preload.append(registry.module_of(target).__name__)
        self._kind = fork_server.Kind(preload, isolated=True)
        fork_server.begin(self._kind, withheld is not None, withheld or ())

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills the zygote. The processes that it has forked exit when their parent does."""
        fork_server.retire(self._kind)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        """Forks `rolecall ARGUMENTS` with `environment`. Waits for the zygote's imports. Raises ForkError."""
        command = Command(list(arguments), dict(environment), str(Path.cwd()), stdout, stderr)
        process = fork_server.context.Process(target=command)
        fork_server.start(process, START_SECONDS, self._kind)
        return Forked(process)

    def call(self, arguments: Sequence[str], seconds: float) -> int:
        """Runs `rolecall ARGUMENTS`, without the zygote if it has ended. Returns the exit code. Raises TimeoutError
        after `seconds`.
        """
        try:
            forked = self.fork(arguments, config.child_environment(), sys.stdout.fileno(), sys.stderr.fileno())
        except fork_server.ForkError:
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
