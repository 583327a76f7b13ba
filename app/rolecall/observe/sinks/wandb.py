"""A run of Weights & Biases, under CHECKPOINT_DIR/wandb, offline unless WANDB_MODE says otherwise. It holds what it was
given for ever: points wait for their checkpoint (see `Held`). A resumed run has the same id, and, offline, a folder of
its own. `wandb sync` joins them, since its own steps, which count rows, go on in the next; the curves' axis is the
metric `step`.
"""

from __future__ import annotations

import importlib
import itertools
import secrets
import time
from pathlib import Path
from typing import Any

from rolecall.observe.sinks import state
from rolecall.observe.sinks.points import Held, Item, Point, flat

FOLDER = "wandb"
STEP = "step"  # the metric that is the curves' axis
FLUSHING = 1.0  # seconds until what it was given is in its file


class WeightsAndBiases:
    """One run."""

    def __init__(self, about: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._folder = Path(about["directory"]) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb takes a temporary one
        self._state = state.read(self._folder)
        self._state.run = self._state.run or secrets.token_hex(4)
        state.write(self._folder, self._state)
        self._covered = 0
        self._held = Held(self._state.last, about["patience"])
        # no upload of this process's output, its code, or the load of its machine: the job runs elsewhere
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True,
                                  x_transaction_log_flush_interval=FLUSHING)  # fmt: skip
        self._run: Any = wandb.init(
            project=about["project"], name=about["title"], id=self._state.run, resume="allow", settings=settings,
        )  # fmt: skip
        self._run.config.update(about["settings"], allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, items: list[Item], covered: int) -> None:
        """See `Sink`."""
        self._held.take(items)
        self._covered = covered
        self._send(self._held.due(covered, time.time()))

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        stopped = state not in ("finished", "failed")
        self._send(self._held.due(self._covered, 0.0) if stopped else self._held.everything())
        results = {name: value for name, value in flat(summary or {}).items() if not name.startswith("settings.")}
        self._run.summary.update(results)
        self._run.finish(exit_code=0 if state == "finished" else 1)

    def _send(self, points: list[Point]) -> None:
        if not points:
            return
        rows = [{STEP: step, **{point.name: point.value for point in some}}
                for step, some in itertools.groupby(points, lambda point: point.step)]  # fmt: skip
        first = self._state.rows
        self._held.drop(points)
        self._state.rows += len(rows)
        state.write(self._folder, self._state)  # first: after a crash in between, none is there twice
        for number, row in enumerate(rows, first):
            self._run.log(row, step=number, commit=True)


begin = WeightsAndBiases
