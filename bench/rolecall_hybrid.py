"""Runs of the `hybrid` job, started as a user starts them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from bench import launch
from bench.bags import BATCH, LEARNING_RATE, TRAINERS, WIDTH
from bench.launch import Speed

STEP = re.compile(r"Epoch \d+\tstep (\d+)\t")
EPOCH = re.compile(r"Epoch (\d+)\ttest accuracy")
DATASETS = {rows: f"bench.local_hybrid:random_{name}"
            for rows, name in ((100_000, "100k"), (1_000_000, "1m"), (10_000_000, "10m"))}  # fmt: skip
INTERVAL = 50  # steps
WARM = 200  # steps


def speed(rows: int, steps: int, progress: Callable[[str], None], **variables: object) -> Speed:
    """Over about `steps` steps in the middle of a run with a table of `rows` rows.

    Raises RuntimeError where the run fails or takes too long. No process is left afterwards.
    """
    fixed = {"NUM_EMBEDDINGS": rows, "DATASET": DATASETS[rows], "EMBEDDING_DIM": WIDTH, "HIDDEN_SIZE": 0,
             "BATCH_SIZE": BATCH, "TRAINERS": TRAINERS, "OPTIMIZER": "sgd", "LR": LEARNING_RATE, "EPOCHS": 1_000_000,
             "CHECKPOINT_INTERVAL": 86400, "LOG_INTERVAL": INTERVAL}  # fmt: skip
    first: tuple[int, float, float] | None = None
    with launch.run("hybrid", 300, {**fixed, **variables}) as running:
        for event in running.events():
            if not (match := STEP.match(event.get("event", ""))):
                continue
            step, at = int(match[1]), datetime.fromisoformat(event["timestamp"]).timestamp()
            progress(f"step {step}")
            if first is None and step >= WARM:
                first = step, at, running.cpu_seconds()
            if first and step >= first[0] + steps:
                measured = step - first[0]
                return Speed(measured / (at - first[1]), (running.cpu_seconds() - first[2]) / measured)
        running.done()
    raise RuntimeError("it ended before its time")


def accuracy(progress: Callable[[str], None], **variables: object) -> tuple[float, float]:
    """On the test samples after a run at the default settings, and its seconds of training."""
    with launch.run("hybrid", 3000, variables) as running:
        for event in running.events():
            if match := EPOCH.match(event.get("event", "")):
                progress(f"epoch {match[1]}")
        done = running.done()
    return float(done["accuracy"]), float(done["seconds"])
