"""Rolecall's side: runs of `rl`, started and evaluated as a user does it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import launch
from bench.peers import process
from bench.peers.process import Run, Snapshot

EVALUATION = 600.0  # seconds that the evaluation of a run's policies may take
EVERY = 0.25  # seconds of training between checkpoints


def train(deadline: float, on: Callable[[str], None], threshold: float | None, episodes: int, sampled: bool = False,
          **variables: Any) -> Run:  # fmt: skip
    """Trains with these variables. With `threshold`, evaluates the checkpoints of every EVERY seconds afterwards; the
    last policy has its scores where `episodes` is not 0. Raises RuntimeError where it fails.

    A run that its deadline ends has no `wall`, and with `threshold` it fails nothing: what it reached counts.
    """
    if threshold is not None:
        variables = {**variables, "CHECKPOINT_INTERVAL": EVERY, "CHECKPOINT_KEEP": 1000}
    started, first = time.monotonic(), 0.0
    with process.mark() as mark:
        variables = {**variables, process.MARK: mark}
        with launch.run("rl", deadline, variables) as running:
            steps = 0.0
            for event in running.events():
                if event.get("event") == "training":
                    first = time.monotonic() - started
                if "steps_per_s" in event:
                    on(f"{time.monotonic() - started:.0f} s, {str(event['event'])[:60]}")
            wall: float | None = None
            try:
                done = running.done()
                wall = time.monotonic() - started
                updates = int(done.get("optimizer_steps", 0))  # of off-policy algorithms
                run = Run(int(done["env_steps"]), float(done["seconds"]), first, wall, updates=updates)
            except (RuntimeError, subprocess.TimeoutExpired):
                if threshold is None or time.monotonic() - started < deadline:
                    raise
                run = Run(0, deadline - first, first)
            if threshold is not None:
                snapshots = _snapshots(running.directory, threshold, sampled, variables)
                steps = run.steps or (snapshots[-1].steps if snapshots else 0)
                run = Run(**{**vars(run), "snapshots": snapshots, "steps": steps})
            if episodes and wall is not None:
                run = Run(**{**vars(run), "scores": [_score(running.directory, episodes, sampled, variables)]})
    return run


def _snapshots(directory: Path, threshold: float, sampled: bool, variables: dict[str, Any]) -> list[Snapshot]:
    words = [*process.python("bench.peers.checkpoints"), str(directory), *["--sampled"] * sampled]
    run = Run()
    with process.lines([*words, f"--threshold={threshold}", f"--every={EVERY}"], EVALUATION, variables) as events:
        for event in events:
            run = process.add(run, event, 0.0)
    return run.snapshots


def _score(directory: Path, episodes: int, sampled: bool, variables: dict[str, Any]) -> float:
    """What `rolecall eval` says of the newest checkpoint."""
    words = [*process.python("rolecall"), "eval", "rl", "--checkpoint", str(directory), "--json"]
    words += ["--episodes", str(episodes), "--no-deterministic" if sampled else "--deterministic"]
    with process.lines(words, EVALUATION, variables) as events:
        for event in events:
            if "mean_return" in event:
                return float(event["mean_return"])
    raise RuntimeError(f"rolecall eval: no result: {json.dumps(words)}")
