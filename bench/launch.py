"""Runs of Rolecall itself, started as a user starts them: `rolecall run JOB`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rolecall.config import Settings
from rolecall.fields import variables


def clean_environment(settings: type[Settings]) -> None:
    """Drop a job's variables from this process's environment: what is measured does not depend on them."""
    for name, *_ in variables(settings):
        os.environ.pop(name, None)


class Run:
    """A run under way; made by `run`."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, what: str) -> None:
        self.process, self.directory, self._what = process, directory, what
        self._lines = deque[str](maxlen=30)

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines of its log as they come, until it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            yield _event(line)

    def done(self) -> dict[str, Any]:
        """What it says in DONE, after its end. Raises RuntimeError where it did not finish."""
        code = self.process.wait(30)
        try:
            found: dict[str, Any] = json.loads((self.directory / "DONE").read_text())
        except FileNotFoundError:
            raise RuntimeError(f"{self._what} (exit code {code}):\n{''.join(self._lines)}") from None
        return found


@contextlib.contextmanager
def run(job: str, deadline: float, variables: dict[str, object], words: Sequence[str] = ()) -> Iterator[Run]:
    """Start `job` with these environment variables, and flags in `words`; it is killed after `deadline` seconds.

    No process is left afterwards.
    """
    environment = {name: str(value) for name, value in variables.items()}
    with tempfile.TemporaryDirectory(prefix=f"bench-{job}-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", "rolecall", "run", job, "--plain", *words],
            env={**os.environ, **environment, "CHECKPOINT_DIR": directory, "LOG_FORMAT": "json"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(deadline, _end, (process,))
        timer.start()
        try:
            yield Run(process, Path(directory), f"not DONE within {deadline:g} s with {environment}")
        finally:
            timer.cancel()
            timer.join()  # where it has gone off, it is ending the run
            _end(process)


def _event(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # not one of Rolecall's own lines
    return found if isinstance(found, dict) else {}


def _end(process: subprocess.Popen[str]) -> None:
    """End the run with everything that it started, if it has not ended by itself."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    _, left = psutil.wait_procs(descendants, timeout=5)  # ranks end with what started them
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
