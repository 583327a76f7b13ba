"""Ranks that start within milliseconds: forked from a process that has imported already all that ranks import.

Started as users start it, a rank takes up to five seconds of a core, nearly all of them to import torch. A forked one
is the same in all else: a process with a session, an environment and an output of its own that runs the command's
`main`, with its own fork server and workers. What a cold start is like is seen where tests ask for one (`cold`), in
those of `local`, and in containers.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from rolecall import __main__, config
from rolecall.job import registry

ROOT = Path(__file__).resolve().parents[2]
JOBS = [registry.get(name) for name in registry.JOBS]
MODULES = {
    "rolecall.rank.supervisor",
    "rolecall.rank.worker",
    *(job.check.partition(":")[0] for job in JOBS if isinstance(job.check, str)),
    *(name for job in JOBS for role in job.roles for name in role.preload),
}


class Server:
    """The process that ranks are forked from, and whose children they are."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            command = f"from tests.integration import warm; warm.serve({theirs.fileno()})"
            # ends with the connection; Ctrl-C is not for it
            self._process = subprocess.Popen(
                [sys.executable, "-c", command], cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True,
                # what supervisors set, torch reads but once
                env=config.child_environment(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1"),
            )  # fmt: skip

    def ask(self, request: tuple[dict[str, str], Path] | int) -> int | None:
        """Start a rank and return its process, which leads a session by now; or return how a process has ended."""
        self._connection.send(request)
        answer: int | None = self._connection.recv()
        return answer

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait(10)


class Process:
    """A rank's process, with what is used of `subprocess.Popen`."""

    def __init__(self, server: Server, environment: dict[str, str], log: Path) -> None:
        self._server = server
        self.returncode: int | None = None
        self.pid = server.ask((environment, log)) or 0
        self._pidfd = os.pidfd_open(self.pid)  # it is there until it was asked how it ended

    def poll(self) -> int | None:
        if self.returncode is None and (code := self._server.ask(self.pid)) is not None:
            self.returncode = code
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            select.select([self._pidfd], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("python -m rolecall", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(descriptor: int) -> None:
    """Fork ranks as asked, until nobody is left to ask."""
    for name in sorted(MODULES):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        begun, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(begun)
            _be(*request, begins)
        os.close(begins)
        os.read(begun, 1)  # until the other end is closed
        os.close(begun)
        connection.send(pid)


def _be(environment: dict[str, str], log: Path, begins: int) -> None:
    """Be `python -m rolecall` with this environment and this output."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    source, target = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number, descriptor in enumerate((source, target, target)):
        os.dup2(descriptor, number)
    for descriptor in (source, target, begins):
        os.close(descriptor)
    multiprocessing.util.spawnv_passfds = _fork  # type: ignore[attr-defined]
    _run(lambda: __main__.main([]))


def _run(function: Callable[[], int | None]) -> NoReturn:
    """Call it and end, without taking torch's modules apart as an interpreter does; nothing gets past this."""
    code: int | None = 1
    try:
        code = function()
        if not sys.stdout.closed:
            sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code or 0)


def _fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """What multiprocessing would have a new interpreter run with `-c`, its fork server above all: here in a fork."""
    pid = os.fork()
    if pid:
        return pid
    _run(lambda: _run_alone(arguments[-1], {0, 1, 2, *map(int, descriptors)}))


def _run_alone(code: str, kept: set[int]) -> None:
    """Run `code` in this fork of a supervisor with nothing of it left but some descriptors."""
    gc.freeze()  # what the supervisor holds does not close descriptors here that are others' by then
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for low, high in pairwise([*sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    importlib.reload(multiprocessing.forkserver)  # its lock is held by the thread that forked
    exec(code, {})
