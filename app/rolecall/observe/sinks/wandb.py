"""A run of Weights & Biases, in CHECKPOINT_DIR/wandb, offline unless WANDB_MODE is set.

A resumed run has the same ID, and, offline, another folder. `wandb sync` joins them: the library's own steps, which
number the rows, continue in the next folder. The curves' axis is the metric `step`.
"""

from __future__ import annotations

import importlib
import itertools
import secrets
from pathlib import Path
from typing import Any

from rolecall.observe.sinks.once import OnceSink
from rolecall.record.history import Point

STEP = "step"  # the metric that is the curves' axis
FLUSH_SECONDS = 1.0


class WeightsAndBiases(OnceSink):
    """One run."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(Path(about["directory"]) / "wandb")
        wandb: Any = importlib.import_module("wandb")
        self.state.run = self.state.run or secrets.token_hex(4)
        self.state.write(self.folder)  # which makes the folder: without it, wandb takes a temporary one
        # no upload of this process's output, its code, or the load of its machine: the job runs elsewhere
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        self._run: Any = wandb.init(
            project=about["project"], name=about["title"], id=self.state.run, resume="allow", settings=settings
        )
        self._run.config.update(about["settings"], allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, points: list[Point]) -> None:
        """See `OnceSink`."""
        rows = [
            {STEP: step, **{point.name: point.value for point in some}}
            for step, some in itertools.groupby(points, lambda point: point.step)
        ]
        for number, row in enumerate(rows, self.state.rows - len(rows)):
            self._run.log(row, step=number, commit=True)

    def finish(self, state: str, results: dict[str, Any], summary: dict[str, Any] | None) -> None:
        """See `OnceSink`."""
        self._run.summary.update(results)
        self._run.finish(exit_code=0 if state == "finished" else 1)


begin = WeightsAndBiases
