"""Other ways to train a large table with two processes of one thread each, run as programs of their own: `PROGRAMS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench.launch import Speed
from bench.peers import process

WARM = 100  # steps
DEADLINE = 300.0  # a fail-safe
PROGRAMS = {"ddp": "bench.peers.ddp_table", "torchrec": "bench.peers.torchrec_table"}


def missing(name: str) -> str | None:
    """Why `name` cannot be measured, in a line; None where it can."""
    return process.missing(name) if name in process.GROUPS else None


def speed(name: str, rows: int, steps: int, progress: Callable[[str], None]) -> Speed:
    """Over `steps` steps with a table of `rows` rows. No process is left afterwards.

    Raises RuntimeError where it fails, TimeoutError where it takes too long.
    """
    progress(f"{steps} steps")
    python = str(process.interpreter(name)) if name in process.GROUPS else sys.executable
    words = [python, "-m", PROGRAMS[name], "--rows", str(rows), "--steps", str(steps), "--warm", str(WARM)]
    with process.lines(words, DEADLINE, {"OMP_NUM_THREADS": 1}) as events:
        for event in events:
            if event.get("event") == "end":
                return Speed(event["steps_per_s"], event["cpu_s_per_step"])
    raise RuntimeError(f"{name}: ended without a result")
