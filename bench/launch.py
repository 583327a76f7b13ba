"""Programs that a benchmark starts: runs of Rolecall, as a user starts them (`run`), and any command (`program`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from rolecall.config import Settings
from rolecall.fields import variables

REPOSITORY = Path(__file__).parents[1]
PERIOD = 0.05  # seconds between two looks
TAIL = 3000  # bytes of a program's output
T = TypeVar("T")


def clean_environment(settings: type[Settings]) -> None:
    """Drop a job's variables from this process's environment: what is measured does not depend on them."""
    for name, *_ in variables(settings):
        os.environ.pop(name, None)


class Speed(NamedTuple):
    """Of a training: steps, samples or tokens a second, and the processor seconds of all processes for one."""

    per_s: float
    cpu_s: float


class Run:
    """A run under way; made by `run`."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, what: str) -> None:
        self.process, self.directory, self._what = process, directory, what
        self._lines = deque[str](maxlen=30)

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines of its log as they come, until it has ended. Raises RuntimeError if a rank is lost: a figure of two
        generations is none.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            event = _event(line)
            if event.get("event") in ("gang lost", "gang stopped") and self.process.poll() is None:
                raise RuntimeError(f"{event['event']}: {event.get('cause')}, {event.get('reason')}")
            yield event

    def cpu_seconds(self) -> float:
        """Of all its processes so far."""
        launcher, seconds = psutil.Process(self.process.pid), 0.0
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                seconds += used.user + used.system
        return seconds

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
        timer = threading.Timer(deadline, end, (process,))
        timer.start()
        try:
            yield Run(process, Path(directory), f"not DONE within {deadline:g} s with {environment}")
        finally:
            timer.cancel()
            timer.join()  # where it has gone off, it is ending the run
            end(process)


def _event(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # not one of Rolecall's own lines
    return found if isinstance(found, dict) else {}


class Program:
    """A command under way, whose output is a file of its `folder`; made by `program`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder

    def ended(self) -> bool:
        return self.process.poll() is not None

    def tail(self) -> str:
        """The end of its output."""
        return (self.folder / "log").read_bytes()[-TAIL:].decode(errors="replace")

    def until(self, condition: Callable[[], T | None], seconds: float, what: str) -> T:
        """Waits for a true value of `condition`, and returns it. Raises RuntimeError if the program ends before, and
        TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            if self.ended():
                raise RuntimeError(f"it ended by itself, before {what}:\n{self.tail()}")
            time.sleep(PERIOD)
        raise TimeoutError(f"not within {seconds:g} s: {what}; its last lines:\n{self.tail()}")


@contextlib.contextmanager
def program(words: Sequence[str], directory: Path, **variables: object) -> Iterator[Program]:
    """Start a command in `directory` with these environment variables, BENCH_FOLDER, its folder, and CHECKPOINT_DIR,
    `run` in that.

    No process and no file is left afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {
            key: str(value)
            for key, value in {"BENCH_FOLDER": folder, "CHECKPOINT_DIR": folder / "run", **variables}.items()
        }
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                list(words),
                cwd=directory,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Program(process, folder)
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a program with everything that it started, if it has not ended by itself."""
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
