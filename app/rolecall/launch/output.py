"""What `rolecall run` prints, by a thread of its own: a terminal that is slow, stopped or gone delays no rank."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

MAX_LINE_BYTES = 4096  # bytes of a line that are shown
MAX_TRACEBACK_LINES = 1000  # lines
TRACEBACK = "Traceback (most recent call last):"
MAX_WAITING_CHARACTERS = 2**20  # characters that wait to be printed
# a line of the log, as text or as JSON, or an error of Rolecall's; or nothing
NAMED = re.compile(r'\d{4}-\d\d-\d\dT[\d:.]+Z \[|\{(?=.*"timestamp": ")|rolecall: |$')
CUT_NOTE = " [cut: the log has the whole line]"
# lines between the tracebacks of one error
CHAINED = re.compile(r"(The above exception was the direct cause of|During handling of the above exception, |$)")
UNPRINTABLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")  # they would break the live display


class Splitter:
    """Splits a stream of bytes into the lines that are shown. A line ends with \\n, \\r or both; what exceeds
    `MAX_LINE_BYTES` bytes is left out, so a stream without any end of line needs no more memory than that."""

    def __init__(self) -> None:
        self._rest = b""
        self._cut = False  # the beginning of this line has been shown already
        self._returned = False  # the last byte was \r

    def split(self, data: bytes) -> list[str]:
        """The lines that `data` ends, and the beginning of one that has become too long."""
        if self._returned:
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r")
        *ended, rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = []
        for line in ended:
            if not self._cut:
                lines.append(_text(line))
            self._cut = False
        self._rest = b"" if self._cut else rest
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(_text(rest))
            self._rest, self._cut = b"", True
        return lines

    def end(self) -> list[str]:
        """The last line, if it has no end of line."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class Tracebacks:
    """Shows what a rank has written with the name of the `rank`, but for lines of the log, which have it. Each
    traceback of a run is shown once; its log has the others. `seen` are those that were shown, by the place and the
    error, of all ranks."""

    def __init__(self, rank: str, seen: set[tuple[str, str]]) -> None:
        self._rank, self._seen = rank, seen
        self._lines: list[str] = []  # of a traceback that has not ended
        self._hides = False  # the last one was shown before

    def show(self, line: str) -> list[str]:
        """The lines to show once `line` has come."""
        if self._hides and not self._lines and CHAINED.match(line):
            return []
        if line.endswith(TRACEBACK):
            before, self._lines = self._lines, [line if line != TRACEBACK else f"{self._rank}: {line}"]
            return before
        if not self._lines:
            self._hides = False
            return [line if NAMED.match(line) else f"{self._rank}: {line}"]
        self._lines.append(line)
        if line.startswith(" ") and len(self._lines) < MAX_TRACEBACK_LINES:
            return []
        place = next((text for text in reversed(self._lines) if text.startswith("  File ")), "")
        lines, self._lines = self._lines, []
        self._hides = (place, line) in self._seen
        if self._hides:
            return []
        self._seen.add((place, line))
        return lines

    def end(self) -> list[str]:
        """What has come of a traceback that goes no further."""
        lines, self._lines = self._lines, []
        return lines


class RankLog:
    """What a rank writes: appended to its log `path`, and its lines shown by `show`; `seen` as of `Tracebacks`."""

    def __init__(self, rank: str, path: Path, show: Callable[[str], None], seen: set[tuple[str, str]]) -> None:
        self._rank, self._path, self._show = rank, path, show
        self._splitter, self._tracebacks, self._problem = Splitter(), Tracebacks(rank, seen), ""

    async def take(self, data: bytes) -> None:
        """The rank has written `data`."""
        if not self._problem and (problem := await asyncio.to_thread(self._append, data)):
            self._problem = problem  # the rank must not wait for a full disk
            self._show(f"{self._rank}: its log {self._path} cannot be written any more ({problem})")
        self._show_all(self._splitter.split(data))

    def end(self) -> None:
        """Shows what has no end yet: nothing more comes."""
        self._show_all(self._splitter.end())
        for line in self._tracebacks.end():
            self._show(line)

    def _show_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            for shown in self._tracebacks.show(line):
                self._show(shown)

    def _append(self, data: bytes) -> str:
        """Appends `data` to the log. Returns the problem, if any."""
        try:
            with self._path.open("ab") as log:
                log.write(data)
        except OSError as error:
            return error.strerror or str(error)
        return ""


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode(errors="replace") + (CUT_NOTE if len(line) > MAX_LINE_BYTES else "")


class Output:
    """Prints lines and, below them, the newest picture. Nothing waits for it but `close`: the oldest lines are left out
    if more than `MAX_WAITING_CHARACTERS` characters wait."""

    def __init__(self, out: TextIO, error: TextIO) -> None:
        # files of its own: at exit, Python waits for a thread that prints to sys.stdout
        self._out, self._error = _opened(out), _opened(error)
        self._console = Console(file=self._out)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._lines: deque[tuple[str, bool]] = deque()
        self._waiting = 0  # characters
        self._left_out = 0  # lines
        self._picture: RenderableType | None = None
        self._last, self._closing = "", False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._print_forever, daemon=True)
        self._thread.start()

    @property
    def width(self) -> int:
        """The terminal's width in characters."""
        return self._console.width

    def line(self, text: str, error: bool = False) -> None:
        """Prints a line, an `error` to the standard error."""
        with self._changed:
            self._lines.append((text, error))
            self._waiting += len(text)
            while self._waiting > MAX_WAITING_CHARACTERS and len(self._lines) > 1:
                self._waiting -= len(self._lines.popleft()[0])
                self._left_out += 1
            self._changed.notify()

    def picture(self, picture: RenderableType) -> None:
        """Displays `picture` in place of the last one."""
        with self._changed:
            self._picture = picture
            self._changed.notify()

    def close(self, last: str, timeout: float) -> None:
        """Prints what waits, and then `last`, for at most `timeout` seconds."""
        with self._changed:
            self._last, self._closing = last, True
            self._changed.notify()
        self._thread.join(timeout)

    def _print_forever(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._picture is not None or self._closing)
                lines, left_out, picture, closing = list(self._lines), self._left_out, self._picture, self._closing
                self._lines.clear()
                self._waiting = self._left_out = 0
                self._picture = None
            # a terminal that is gone (rich ends the program if a pipe breaks): the job continues without it
            with contextlib.suppress(OSError, ValueError, SystemExit):
                if left_out:
                    self._print(f"rolecall: {left_out} lines are not shown; the logs have them", False)
                for text, error in lines:
                    self._print(text, error)
                self._out.flush()
                if picture is not None:
                    self._live.start()
                    self._live.update(picture, refresh=True)
        with contextlib.suppress(OSError, ValueError, SystemExit):
            self._live.stop()
            print(self._last, file=self._out, flush=True)

    def _print(self, text: str, error: bool) -> None:
        if self._live.is_started:
            self._console.print(Text(printable(text)))
        elif error:
            self._out.flush()  # in order
            print(text, file=self._error, flush=True)
        else:
            print(text, file=self._out)


def printable(text: str) -> str:
    """`text` without colors and other control characters."""
    return UNPRINTABLE.sub("", text)


def _opened(stream: TextIO) -> TextIO:
    # nothing that a rank writes may lack a representation
    return open(stream.fileno(), "w", encoding=stream.encoding, errors="replace", closefd=False)
