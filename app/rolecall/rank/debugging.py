"""`breakpoint()` in a worker: pdb at a Unix socket in the run's folder, to which `rolecall debug` attaches.

Text passes in both directions. A NUL says that a line is wanted; what is before it, after the last line, is the prompt.
"""

from __future__ import annotations

import contextlib
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
LINE_WANTED = "\0"
LEFT = "detached; {} goes on\n"


def possible() -> bool:
    """Whether this process is one of `rolecall run`, on the same machine."""
    return Path(tempfile.gettempdir(), control.SOCKET).exists()


class Terminal:
    """The terminal that is attached to this process, the worker of `member`, for one thread at a time. `debugging` is
    told whether somebody is attached, or waited for; `run` is the folder for `rolecall debug`."""

    def __init__(self, run: Path, member: str, debugging: Callable[[bool], None]) -> None:
        self.member, self._run, self._debugging = member, run, debugging
        self.taken = threading.Lock()  # by the thread that is stopped
        self._socket: socket.socket | None = None
        self._lines = ""  # that were read in advance

    # ---- who is attached

    def attach(self, place: str) -> bool:
        """Waits until somebody is attached, as a thread is stopped at `place`. Returns False if nobody comes."""
        if self._socket is not None:
            return True
        self._debugging(True)
        command = f"rolecall debug {self._run} {self.member}"
        telemetry.log().warning(f"breakpoint at {place}: {command}")
        path = control.debugger(Path(tempfile.gettempdir()), self.member)
        path.unlink(missing_ok=True)  # of a worker that was killed
        problem = f"nobody has attached for {ATTACH_SECONDS:g} s"
        try:
            with unix_listener(path) as listener:
                self._socket = _accept(listener, time.monotonic() + ATTACH_SECONDS)
        except OSError as error:  # a socket's path has at most 107 characters
            problem = f"nobody can attach: {error}"
        finally:
            path.unlink(missing_ok=True)
        if self._socket is None:
            telemetry.log().warning(f"{self.member} goes on from {place}: {problem}")
            self._debugging(False)
            return False
        threading.Thread(target=self._watch, args=(self._socket,), name="debugger", daemon=True).start()
        return True

    def _watch(self, connection: socket.socket) -> None:
        """Notices that the other side has gone, also while no thread is stopped."""
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()  # until it goes, or this process ends
        self.detach()
        connection.close()

    def detach(self) -> None:
        """Nobody is attached any more."""
        connection, self._socket, self._lines = self._socket, None, ""
        if connection is not None:
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
    """pdb of one thread, at a `terminal`. The prompt names the member."""

    def __init__(self, terminal: Terminal) -> None:
        files: Any = terminal
        super().__init__(stdin=files, stdout=files, nosigint=True)  # Ctrl-C is for the supervisor
        self._terminal, self.prompt = terminal, f"({terminal.member}) "

    def interaction(self, *args: Any) -> None:
        """See `pdb.Pdb`."""
        with self._terminal.taken:
            if self._terminal.attach(_place_of(args[0])):
                super().interaction(*args)
            else:
                self._go_on()

    def set_quit(self) -> None:
        """The user leaves: the thread goes on without stops."""
        self._terminal.write(LEFT.format(self._terminal.member))
        self._terminal.detach()
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
            Debugger(terminal).stop_in(frame)

    signal.signal(SIGNAL, stop)


def _place_of(frame: FrameType) -> str:
    return f"{loader.shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"
