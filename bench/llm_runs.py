"""Runs of GRPO by bench_llm.py: examples/grpo.py itself, a single process, and peers' programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from bench.llm_events import VARIABLE, Events, Update
from bench.peers import process

REPOSITORY = process.REPOSITORY
PATHS = (REPOSITORY, REPOSITORY / "app", REPOSITORY / "examples")
PERIOD = 0.05  # seconds between looks
START_SECONDS = 240.0  # to the first update, the supervised phase included
LOG_TAIL = 3000  # bytes
Found = TypeVar("Found")


def ours() -> list[str]:
    return [*process.python("rolecall"), "run", "bench/grpo_job.py", "--plain"]


def single() -> list[str]:
    return process.python("bench.local_grpo")


def peer(name: str) -> list[str]:
    """The command of a peer's program. Raises RuntimeError if it is not installed."""
    if problem := process.missing(name):
        raise RuntimeError(problem)
    return [str(process.interpreter(name)), "-m", f"bench.peers.grpo_{name}"]


class Run:
    """A run under way; `run` makes it."""

    def __init__(self, started: subprocess.Popen[bytes], events: Events, log: Path) -> None:
        self._process, self._events, self._log = started, events, log

    @property
    def events(self) -> Events:
        """All that its processes have reported."""
        self._events.read()
        return self._events

    @property
    def updates(self) -> list[Update]:
        return self.events.updates

    def ended(self) -> bool:
        return self._process.poll() is not None

    def tail(self) -> str:
        """The end of its output."""
        return self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace")

    def until(self, condition: Callable[[], Found | None], seconds: float, what: str) -> Found:
        """Waits for a true value of `condition`, and returns it. Raises RuntimeError if the run ends before, and
        TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            if self.ended():
                raise RuntimeError(f"the run ended by itself, before {what}:\n{self.tail()}")
            time.sleep(PERIOD)
        raise TimeoutError(f"not within {seconds:g} s: {what}; the run's last lines:\n{self.tail()}")

    def sleep(self, seconds: float) -> None:
        """Waits. Raises RuntimeError if the run ends meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.ended():
                raise RuntimeError(f"the run ended by itself:\n{self.tail()}")
            time.sleep(PERIOD)

    def begun(self) -> float:
        """When the first update of the policy after the supervised phase ended; waits for it."""
        return self.until(lambda: self.updates[:1], START_SECONDS, "the first update")[0].at

    def kill(self, role: str, number: int) -> float:
        """Kills the process of a member, and returns when. Waits for one that is in use."""

        def alive() -> int | None:
            pid = self.events.pid(role, number)
            return pid if pid is not None and psutil.pid_exists(pid) else None

        pid = self.until(alive, START_SECONDS, f"a process of {role} {number}")
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at


@contextlib.contextmanager
def run(words: list[str], **variables: object) -> Iterator[Run]:
    """Starts a program with these settings; none of its processes is left afterwards."""
    with (
        process.mark() as mark,
        tempfile.TemporaryDirectory(prefix="bench-llm-", ignore_cleanup_errors=True) as folder,
    ):
        directory = Path(folder)
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            "OMP_NUM_THREADS": "1",
            "CHECKPOINT_DIR": str(directory / "run"),
            VARIABLE: str(directory / "events"),
            process.MARK: mark,
            **{name: str(value) for name, value in variables.items()},
        }
        with (directory / "log").open("wb") as log:
            started = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Run(started, Events(directory / "events"), directory / "log")
        finally:
            _end(started)


def _end(started: subprocess.Popen[bytes]) -> None:
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(started.pid).children(recursive=True)
    started.kill()
    started.wait(10)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
