"""The file of a worker's spans, of a bounded size; a rank's folder has the newest few."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rolecall import config

MAX_FILES = 3  # in a folder, collected or not
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def file_name(generation: int, join: int = 0) -> str:
    """The name of the file of a worker, as the part `join` of a generation. Names sort by age."""
    return f"trace-{generation:09d}-{join:06d}.jsonl"


class SpanFile:
    """A new file at `path`, which begins with the process that `about` is part of: see `records.Process`.

    Raises OSError if it cannot be written.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.full = path, True
        self._left = 0  # bytes
        for old in sorted(path.parent.glob("trace-*.jsonl"))[: 1 - MAX_FILES]:
            old.unlink(missing_ok=True)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.began = time.monotonic_ns()
        process = {**about, "pid": os.getpid(), "host": config.host_name()}
        clocks = {"monotonic_ns": self.began, "unix_ns": time.time_ns()}
        try:
            self._write([line("process", {**process, **clocks})])
        except OSError:
            self.close()
            raise

    def allow(self, size: int) -> None:
        """Allows `size` more bytes."""
        self._left, self.full = size, False

    def write(self, lines: Iterable[str], last: str) -> None:
        """Adds lines, of ASCII characters; `last` instead of the first one beyond the limit. Then, and if it cannot be
        written, it is `full`. Raises OSError."""
        fitting = []
        for each in lines:
            self._left -= len(each)
            if self._left < 0:
                fitting.append(last)
                self.full = True
                break
            fitting.append(each)
        self._write(fitting)

    def _write(self, lines: list[str]) -> None:
        data = "".join(lines).encode()
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            self.full = True
            raise

    def close(self) -> None:
        """Closes it."""
        os.close(self.descriptor)


def line(*record: Any) -> str:
    """A record as a line."""
    return _encode(record) + "\n"
