"""The zygote of `rolecall run`: a process that imports torch once, and forks each command that it is asked for.

A rank that is forked shares what is imported, so the ranks of one machine start in the time of one. The zygote has one
thread and no event loop, and forks nothing once `rolecall run` has ended. It knows no user's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker

from rolecall import config, machine
from rolecall.declare import describe, registry
from rolecall.errors import UsageError
from rolecall.rank import fork_server

DEADLINE = 120.0  # seconds for its imports: torch alone takes several on a busy machine
TELLING = 2.0  # seconds for the zygote to tell that a process has ended
NUMBER = struct.Struct("=i")  # of a process, then its exit code
parent = 0  # of a process that was forked from it: its process number


class ZygoteError(Exception):
    """It has ended, or does not answer; says why."""


class Forked:
    """A process that `zygote` has forked, the leader of a session. Its status comes over the pipe `status`."""

    def __init__(self, pid: int, status: int, zygote: subprocess.Popen[bytes]) -> None:
        self.pid, self._zygote = pid, zygote
        self.returncode: int | None = None
        self._status = status

    async def wait(self) -> int:
        """Waits for its end. Returns its exit code, negative for a signal; where the zygote has ended, it is killed.

        A zygote that does not tell of its end is frozen: it is continued, and killed if that does not help.
        """
        with contextlib.suppress(ProcessLookupError):  # the zygote has reaped it, so it tells
            pidfd = os.pidfd_open(self.pid)
            try:
                await _either(self._status, pidfd)
            finally:
                os.close(pidfd)
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_either(self._status), TELLING)
                break
            self._zygote.send_signal(number)
        await _either(self._status)
        return self._take()

    def wait_for(self, seconds: float) -> int:
        """`wait` without an event loop, also once more. Raises TimeoutError."""
        if self.returncode is not None:
            return self.returncode
        if not _readable(self._status, seconds):
            raise TimeoutError
        return self._take()

    def _take(self) -> int:
        code = _read(self._status)
        os.close(self._status)
        if code is None:  # another process takes its place, with the same ports
            self.kill()
        self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def terminate(self) -> None:
        """Sends it SIGTERM."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kills its process group, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            os.killpg(self.pid, signal.SIGKILL)
            _readable(pidfd, fork_server.KILL)
            os.close(pidfd)


class Zygote:
    """The handle of `rolecall run` on its zygote for `targets`, which are jobs. As a context, it ends the zygote."""

    def __init__(self, *targets: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: no module of the working directory may replace one of a library
            command = [sys.executable, "-P", "-m", "rolecall", "zygote", str(theirs.fileno()), *targets]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=config.child_environment(PYTHONUNBUFFERED="1"),
            )  # fmt: skip

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends it; what it has forked sees that of its parent."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        """Forks `rolecall ARGUMENTS` with `environment`. Waits for the zygote's imports. Raises ZygoteError."""
        status, theirs = os.pipe()
        try:
            with tempfile.TemporaryFile("w+") as request:  # a datagram may be too small for it
                json.dump([list(arguments), dict(environment)], request)
                request.flush()
                socket.send_fds(self._requests, [b"fork"], [request.fileno(), stdout, stderr, theirs])
        except OSError as error:
            os.close(status)
            raise ZygoteError(f"it has ended ({error.strerror})") from error
        finally:
            os.close(theirs)
        if not _readable(status, DEADLINE) or (pid := _read(status)) is None:
            os.close(status)  # which takes the request back
            raise ZygoteError(f"it has ended, or did not answer for {DEADLINE:g} s")
        return Forked(pid, status, self._process)

    def call(self, arguments: Sequence[str], seconds: float) -> int:
        """Runs `rolecall ARGUMENTS`, without the zygote where that has ended. Returns its exit code. Raises
        TimeoutError after `seconds`.
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


def serve(requests: socket.socket, targets: Sequence[str]) -> list[str]:
    """Imports what the ranks of `targets` need, and forks what is asked for. Returns in each forked process, with its
    arguments. Ends the process where `requests` is closed.
    """
    with contextlib.suppress(UsageError):  # the check of the settings says what is wrong
        machine.name_process(" ".join(registry.name_of(target) for target in targets), "", None, "zygote")
    fork_server.prepare_imports()
    resource_tracker.ensure_running()  # otherwise each rank starts one, which is another interpreter
    importlib.import_module(fork_server.MAIN)
    importlib.import_module("rolecall.rank.start")
    jobs = [registry.get(target) for target in targets if target in registry.JOBS]
    for module in dict.fromkeys(name for job in jobs for role in job.roles for name in role.preload):
        with contextlib.suppress(ImportError):  # the check of the settings says what is wrong
            importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy every page
    me, children = os.getpid(), dict[int, tuple[int, int]]()  # by pidfd: process number, pipe for its status
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                poll.unregister(ready)
                pid, status = children.pop(ready)
                os.close(ready)
                _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(status)
                continue
            message, fds, _, _ = socket.recv_fds(requests, 16, 4)
            if not message:  # `rolecall run` is gone; its ranks see that of their parent
                os._exit(0)
            if len(fds) < 4 or _given_up(fds[-1]):
                _close(*fds)
                continue
            request, stdout, stderr, status = fds
            with os.fdopen(request) as file:
                file.seek(0)
                arguments, environment = json.load(file)
            begun, begins = os.pipe()
            try:
                pid = os.fork()
            except OSError:  # too many processes; who asked sees that no number comes
                _close(stdout, stderr, status, begun, begins)
                continue
            if not pid:
                # not only a group: one that lost its leader, and has a frozen member, would get SIGHUP
                os.setsid()
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                others = [other for _, other in children.values()]
                _close(stdout, stderr, status, begun, begins, requests.detach(), *children, *others)
                _become(environment, me)
                return list(arguments)
            _close(stdout, stderr, begins)
            os.read(begun, 1)  # until it leads its session, or has ended
            os.close(begun)
            _tell(status, pid)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read, or an end, within some seconds; `select` knows the first 1,024 files only."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


async def _either(*fds: int) -> None:
    """Waits until one of `fds` is readable, or at its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    for fd in fds:
        loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        for fd in fds:
            loop.remove_reader(fd)


def _given_up(status: int) -> bool:
    """Whether nobody reads the pipe any more."""
    poll = select.poll()
    poll.register(status, 0)
    return bool(poll.poll(0))


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, NUMBER.pack(number))


def _read(status: int) -> int | None:
    """One number: there may be two by now. None where the zygote has ended."""
    data = os.read(status, NUMBER.size)
    return int(NUMBER.unpack(data)[0]) if data else None


def _become(environment: dict[str, str], zygote: int) -> None:
    global parent
    parent = zygote
    config.replace_environment(environment)
    tempfile.tempdir = None  # TMPDIR may be another
