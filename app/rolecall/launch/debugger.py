"""`rolecall debug`: attaches the terminal to a member of a local run, at its breakpoint or at its next line.

rank/debugging.py is the other side.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rolecall import machine
from rolecall.errors import UsageError
from rolecall.launch import commands
from rolecall.messages import control
from rolecall.messages.control import ListedRank
from rolecall.observe import targets
from rolecall.rank.debugging import LINE_WANTED, SIGNAL
from rolecall.record import rundir
from rolecall.tunnel.local import process_at, same_user

LOOK_SECONDS = 0.05  # between two looks whether the member has stopped
HINT_SECONDS = 3.0  # after which a member that does not stop is told of
INTERRUPTED = 130  # exit code


def parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall debug`."""
    parser = argparse.ArgumentParser(
        prog="rolecall debug",
        description="pdb in a rank of a local run: at its breakpoint(), or else at the next line of its main thread. "
        "Meanwhile no time limit of the run counts. `q`, or the end of input, detaches, and the rank goes on. Ctrl-C "
        "stops one that goes on after `c`; a second one detaches.",
    )
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
    parser.add_argument("rank", metavar="RANK", help="ROLE_ORDINAL, as `rolecall ps` lists it")
    return parser


def run(words: Sequence[str]) -> int:
    """Attaches the terminal until the user or the member leaves. Returns the exit code. Raises UsageError."""
    arguments = parser().parse_args(words)
    rank, local = commands.find(arguments.run, arguments.rank), targets.run_in(rundir.find(arguments.run))
    if rank.host or local is None:
        raise UsageError(f"{rank.name}: runs on {rank.host}; `rolecall debug` attaches to ranks of this machine")
    folder = Path(local.control).parent
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  edits and remembers what `input` reads
    try:
        connection = _connect(folder, rank) or _stop(rank, arguments.run, folder)
        with connection:
            return Client(connection, rank.name).run()
    except KeyboardInterrupt:
        return INTERRUPTED


def _connect(folder: Path, rank: ListedRank) -> socket.socket | None:
    """A connection to a process of a member that is stopped; None if none is, or somebody else is attached."""
    for path in sorted(folder.glob(control.debugger(rank.name))):
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # nobody listens
            connection.connect(str(path))
            if same_user(connection):
                return connection
        connection.close()
    return None


def _stop(rank: ListedRank, run: str, folder: Path) -> socket.socket:
    """Stops the main thread of a rank's worker, and attaches. Ctrl-C ends the wait for its next line."""
    pid = next((process.pid for part, process in machine.parts(rank.pid) if part == "worker"), 0) if rank.pid else 0
    if not pid or not _interrupt(pid):
        raise UsageError(f"{rank.name}: has no worker that can be stopped; `rolecall ps {run}` lists its processes")
    hint_at = time.monotonic() + HINT_SECONDS
    while (connection := _connect(folder, rank)) is None:
        if not Path(f"/proc/{pid}").exists():
            raise UsageError(f"{rank.name}: its worker has ended")
        if time.monotonic() > hint_at:
            hint_at = float("inf")
            why = f"its main thread executes no line of the job now, or is debugged; `rolecall stacks {run}` shows it"
            print(f"rolecall: {rank.name}: {why}; waiting, Ctrl-C ends that", file=sys.stderr)
        time.sleep(LOOK_SECONDS)
    return connection


def _interrupt(pid: int) -> bool:
    """Has the main thread of a worker stop at its next line. Returns False if it does not take the signal."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        if int(caught, 16) >> (SIGNAL - 1) & 1:  # otherwise the signal would end it
            os.kill(pid, SIGNAL)
            return True
    return False


class Client:
    """A terminal that is attached to the member `name`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection, self._name = connection, name
        self._pid = process_at(connection)[0]
        self._line = ""  # the last one, which is no whole one

    def run(self) -> int:
        """Shows what comes, and sends the lines that are wanted, until the connection ends. Returns the exit code."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        is_interrupted = False
        while True:
            try:
                data = self._connection.recv(2**16)
            except KeyboardInterrupt:
                if is_interrupted or not _interrupt(self._pid):
                    raise
                is_interrupted = True
                print(f"rolecall: {self._name} stops at its next line; Ctrl-C again detaches", file=sys.stderr)
                continue
            except OSError:  # it was killed
                data = b""
            if not data:
                print(f"{self._line}rolecall: {self._name} is not attached any more", file=sys.stderr)
                return 0
            *shown, rest = decoder.decode(data).split(LINE_WANTED)
            for text in shown:
                self._show(text)
                self._answer()
                is_interrupted = False
            self._show(rest)

    def _show(self, text: str) -> None:
        whole, newline, self._line = (self._line + text).rpartition("\n")
        sys.stdout.write(whole + newline)
        sys.stdout.flush()

    def _answer(self) -> None:
        prompt, self._line = self._line, ""
        try:
            while True:
                try:
                    line = input(prompt)
                    break
                except KeyboardInterrupt:  # as in a shell: another line
                    print()
        except EOFError:
            with contextlib.suppress(OSError):  # it has gone
                self._connection.shutdown(socket.SHUT_WR)
            print()
            return
        with contextlib.suppress(OSError):  # it has gone, as the next read notices
            self._connection.sendall(f"{line}\n".encode())
