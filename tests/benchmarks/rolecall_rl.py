"""Runs of Rolecall itself, started as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from app import config
from app.jobs.rl import RlSettings

ITERATION = re.compile(r"Episode (\d+)\t.*Average reward: ([\d.-]+)")


@dataclass(frozen=True)
class Result:
    """`seconds` run from the first step to the last update; `steps` are the environment steps learned from in them.

    `steady_steps_per_s` is the median rate of the progress lines after the first one.
    """

    solved: bool
    iterations: int
    steps: int
    seconds: float
    running_reward: float
    steady_steps_per_s: float

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second, learning included."""
        return self.steps / self.seconds


def clean_environment() -> None:
    """Drop Rolecall's variables from this process's environment: what is measured does not depend on them."""
    for name, *_ in config.variables(RlSettings):
        os.environ.pop(name, None)


def run(
    deadline: float = 600.0, progress: Callable[[tuple[int, float]], None] = lambda news: None, **variables: object
) -> Result:
    """Run `python -m app local rl` with these environment variables to its end.

    `progress` is called with (iteration, running reward) at each progress line. Raises RuntimeError where the run
    fails or takes longer than `deadline` seconds. No process is left afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="bench-rl-", ignore_cleanup_errors=True) as directory:
        environment = {name: str(value) for name, value in variables.items()}
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "local", "rl", "--plain"],
            env={**os.environ, **environment, "CHECKPOINT_DIR": directory, "LOG_FORMAT": "json"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(deadline, _end, (process,))
        timer.start()
        rates, lines = [], deque[str](maxlen=30)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                event = _event(line)
                if match := ITERATION.match(event.get("event", "")):
                    rates.append(float(event["steps_per_s"]))
                    progress((int(match[1]), float(match[2])))
            code = process.wait(30)
        finally:
            timer.cancel()
            timer.join()  # where it has gone off, it is ending the run
            _end(process)
        try:
            done = json.loads(Path(directory, "DONE").read_text())
        except FileNotFoundError:
            raise RuntimeError(
                f"not DONE within {deadline:g} s (exit code {code}) with {environment}:\n{''.join(lines)}"
            ) from None
    return Result(
        bool(done["solved"]),
        int(done["iterations"]),
        int(done["env_steps"]),
        float(done["seconds"]),
        float(done["running_return"]),
        statistics.median(rates[1:]) if len(rates) > 1 else float(done["env_steps"]) / float(done["seconds"]),
    )


def _event(line: str) -> dict[str, str]:
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
