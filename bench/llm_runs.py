"""Runs of GRPO by bench_llm.py: examples/grpo.py itself, a single process, and peers' programs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil

from bench import launch
from bench.launch import PERIOD, REPOSITORY, Program
from bench.llm_events import FILE, Events, Update
from bench.peers import process

PATHS = (REPOSITORY, REPOSITORY / "app", REPOSITORY / "examples")
START_SECONDS = 240.0  # to the first update, the supervised phase included


def ours() -> list[str]:
    return [*process.python("rolecall"), "run", "bench/grpo_job.py", "--plain"]


def single() -> list[str]:
    return process.python("bench.local_grpo")


def peer(name: str) -> list[str]:
    """The command of a peer's program. Raises RuntimeError if it is not installed."""
    if problem := process.missing(name):
        raise RuntimeError(problem)
    return [str(process.interpreter(name)), "-m", f"bench.peers.grpo_{name}"]


class Run(Program):
    """A run under way; `run` makes it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.process, program.folder)
        self._events = Events(program.folder / FILE)

    @property
    def events(self) -> Events:
        """All that its processes have reported."""
        self._events.read()
        return self._events

    @property
    def updates(self) -> list[Update]:
        return self.events.updates

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
    paths = os.pathsep.join(map(str, PATHS))
    with process.mark() as mark:
        common = {"PYTHONPATH": paths, "OMP_NUM_THREADS": 1, process.MARK: mark}
        with launch.program(words, REPOSITORY, **{**common, **variables}) as started:
            yield Run(started)
