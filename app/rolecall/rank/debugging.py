"""`breakpoint()` in a worker: pdb at a Unix socket in the run's folder, to which `rolecall debug` attaches.

Text passes in both directions. A NUL says that a line is wanted; what is before it, after the last line, is the prompt.
"""

from __future__ import annotations

import contextlib
import os
import pdb  # noqa: T100 for breakpoints of roles
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from rolecall import telemetry
from rolecall.declare import loader
from rolecall.messages import control
from rolecall.tunnel.local import same_user, unix_listener

SIGNAL = signal.SIGRTMIN + 10  # stops the main thread at its next line; not used by other programs
ATTACH_SECONDS = 600.0  # that a thread waits at a breakpoint for somebody to attach
STOP_SECONDS = 5.0  # the same after SIGNAL, whose sender attaches at once or has gone
LINE_WANTED = "\0"
LEFT = "detached; {} goes on\n"


def possible() -> bool:
    """Whether this process is one of `rolecall run`, on the same machine."""
    path = Path(tempfile.gettempdir(), control.SOCKET)
    return path.is_socket() and path.stat().st_uid == os.getuid()


class Terminal:
    """The terminal that is attached to this process, the worker of `member`, for one thread at a time. `debugging` is
    told whether somebody is attached, or waited for; `run` is the folder for `rolecall debug`."""

    def __init__(self, run: Path, member: str, debugging: Callable[[bool], None]) -> None:
        self.member, self._run, self._debugging = member, run, debugging
        self.taken = threading.Lock()  # by the thread that is stopped
        self._lock = threading.Lock()  # for changes of the connection, each with its report
        self._socket: socket.socket | None = None
        self._seconds = ATTACH_SECONDS  # shorter once nobody has come
        self._lines = ""  # that were read in advance

    # ---- who is attached

    @property
    def connection(self) -> socket.socket | None:
        """That of who is attached."""
        return self._socket

    def attach(self, place: str, seconds: float = ATTACH_SECONDS) -> bool:
        """Waits until somebody is attached, as a thread is stopped at `place`. Returns False if nobody comes."""
        with self._lock:
            if self._socket is not None:
                return True
            self._debugging(True)
        seconds = min(seconds, self._seconds)
        command = f"rolecall debug {self._run} {self.member}"
        telemetry.log().warning(f"breakpoint at {place}: {command}")
        path = Path(tempfile.gettempdir(), control.debugger(self.member, os.getpid()))
        problem = f"nobody has attached for {seconds:g} s"
        try:
            path.unlink(missing_ok=True)  # of a killed process that had this number
            with unix_listener(path) as listener:
                self._socket = _accept(listener, time.monotonic() + seconds)
        except OSError as error:  # a socket's path has at most 107 characters
            problem = f"nobody can attach: {error}"
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        if self._socket is None:
            self._seconds = STOP_SECONDS
            telemetry.log().warning(f"{self.member} goes on from {place}: {problem}")
            self._debugging(False)
            return False
        self._seconds = ATTACH_SECONDS
        threading.Thread(target=self._watch, args=(self._socket,), name="debugger", daemon=True).start()
        return True

    def _watch(self, connection: socket.socket) -> None:
        """Notices that the other side has gone, also while no thread is stopped."""
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()  # until it goes, or this process ends
        self.detach(connection)
        connection.close()

    def detach(self, connection: socket.socket | None) -> None:
        """Nobody is attached by `connection` any more. Does nothing if it is not the one in use."""
        with self._lock:
            if connection is None or connection is not self._socket:
                return
            self._socket, self._lines = None, ""
            with contextlib.suppress(OSError):  # it has gone
                connection.shutdown(socket.SHUT_RDWR)
            self._debugging(False)

    # ---- as files for pdb

    def write(self, text: str) -> int:
        """Writes `text`, unless nobody is attached."""
        self._send(text.replace(LINE_WANTED, ""))
        return len(text)

    def _send(self, text: str) -> None:
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # it has gone, as the next read notices
                connection.sendall(text.encode(errors="replace"))

    def flush(self) -> None:
        """Nothing is kept."""

    def readline(self) -> str:
        """A line; empty if the other side has gone."""
        self._send(LINE_WANTED)
        while "\n" not in self._lines:
            data = b""
            if (connection := self._socket) is not None:
                with contextlib.suppress(OSError):  # it has gone
                    data = connection.recv(2**16)
            if not data:
                return ""
            self._lines += data.decode(errors="replace")
        line, _, self._lines = self._lines.partition("\n")
        return f"{line}\n"


def _accept(listener: socket.socket, end: float) -> socket.socket | None:
    """The first connection of this user; None if there is none until `end`."""
    while (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        if same_user(connection):
            connection.setblocking(True)
            return connection
        connection.close()
    return None


class Debugger(pdb.Pdb):
    """pdb of one thread, at a `terminal`. The prompt names the member. A stop waits `seconds` for somebody to attach;
    once somebody has attached and gone, the thread goes on without stops."""

    def __init__(self, terminal: Terminal, seconds: float = ATTACH_SECONDS) -> None:
        files: Any = terminal
        # Ctrl-C is for the supervisor; .pdbrc of the working directory is code that the user did not ask for
        super().__init__(stdin=files, stdout=files, nosigint=True, readrc=False)
        self._terminal, self._seconds, self.prompt = terminal, seconds, f"({terminal.member}) "
        self._connection: socket.socket | None = None  # by which this thread was debugged

    def stop_here(self, frame: FrameType) -> bool:
        """Not in Rolecall's own code, which may hold a lock that a report takes. See `bdb.Bdb`."""
        return not _is_rolecalls(frame) and bool(super().stop_here(frame))

    def interaction(self, *args: Any) -> None:
        """See `pdb.Pdb`."""
        with self._terminal.taken:
            has_gone = self._connection is not None and self._connection is not self._terminal.connection
            if not has_gone and self._terminal.attach(_place_of(args[0]), self._seconds):
                self._connection = self._terminal.connection
                super().interaction(*args)
            else:
                self._go_on()

    def set_quit(self) -> None:
        """The user leaves: the thread goes on without stops."""
        self._terminal.write(LEFT.format(self._terminal.member))
        self._terminal.detach(self._terminal.connection)
        self._go_on()

    def _go_on(self) -> None:
        self.clear_all_breaks()
        self.set_continue()

    def stop_in(self, frame: FrameType) -> None:
        """Stops at the next line of `frame`, which this thread executes."""
        self.reset()
        each: FrameType | None = frame
        while each is not None:
            each.f_trace, self.botframe, each = self.trace_dispatch, each, each.f_back
        self.set_next(frame)
        sys.settrace(self.trace_dispatch)


def install(terminal: Terminal) -> None:
    """`breakpoint()` stops the thread that calls it, and SIGNAL the main thread, which calls this."""
    sys.breakpointhook = lambda *_, **__: Debugger(terminal).set_trace(sys._getframe(1))

    def stop(_: int, frame: FrameType | None) -> None:
        while frame is not None and not loader.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and not terminal.taken.locked():
            Debugger(terminal, STOP_SECONDS).stop_in(frame)

    signal.signal(SIGNAL, stop)


def _place_of(frame: FrameType) -> str:
    return f"{loader.shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"


def _is_rolecalls(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("rolecall.") and not name.startswith("rolecall.jobs.")
