"""A run of MLflow, at MLFLOW_TRACKING_URI, or in files in CHECKPOINT_DIR/mlflow. It holds what it was given for ever:
points wait for their checkpoint (see `Held`). A resumed run continues the run whose id is in the folder.
"""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from typing import Any

from rolecall.observe.sinks import state
from rolecall.observe.sinks.points import Held, Item, Point, flat

FOLDER = "mlflow"
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # in one call
LONGEST = 500  # characters of a parameter or a tag, which older servers take
REFUSED = re.compile(r"[^\w\-. :/]")  # in a metric's name
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow:
    """One run."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
        self._folder = Path(about["directory"]) / FOLDER
        self._state = state.read(self._folder)
        self._covered = 0
        parameters = self._resume() if self._state.run else None
        if parameters is None:
            parameters = self._create(about)
        self._held = Held(self._state.last, about["patience"])
        new = [
            self._entities.Param(name, str(value)[:LONGEST])
            for name, value in about["settings"].items()
            if name not in parameters
        ]  # a parameter never changes
        for first in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._state.run, params=new[first : first + MOST_PARAMETERS])

    def _resume(self) -> set[str] | None:
        """The names of the parameters that the run has; None where it is not there."""
        missing = importlib.import_module("mlflow.exceptions").MlflowException
        try:
            run = self._client.get_run(self._state.run)
        except missing as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        self._client.update_run(self._state.run, status="RUNNING")
        return set(run.data.params)

    def _create(self, about: dict[str, Any]) -> set[str]:
        experiment = self._client.get_experiment_by_name(about["experiment"])
        number = experiment.experiment_id if experiment else self._client.create_experiment(about["experiment"])
        tags = {"rolecall.version": about["version"], "rolecall.directory": about["directory"]}
        run = self._client.create_run(number, run_name=about["title"], tags=tags)
        self._state = state.State(run.info.run_id)
        state.write(self._folder, self._state)
        return set()

    def write(self, items: list[Item], covered: int) -> None:
        """See `Sink`."""
        self._held.take(items)
        self._covered = covered
        self._send(self._held.due(covered, time.time()))

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        stopped = state not in ("finished", "failed")
        self._send(self._held.due(self._covered, 0.0) if stopped else self._held.everything())
        run = self._state.run
        for name, value in flat(summary or {}).items():
            if not name.startswith("settings."):
                self._client.set_tag(run, f"rolecall.{name}", str(value)[:LONGEST])
        self._client.set_terminated(run, STATUS.get(state, "KILLED"))
        if summary is not None:
            self._client.log_dict(run, summary, "summary.json")

    def _send(self, points: list[Point]) -> None:
        for first in range(0, len(points), MOST_METRICS):
            some = points[first : first + MOST_METRICS]
            before = dict(self._state.last)
            self._held.drop(some)
            # first what was written, then the points: after a crash in between, none is there twice
            state.write(self._folder, self._state)
            try:
                self._client.log_batch(self._state.run, metrics=[
                    self._entities.Metric(REFUSED.sub("_", name), value, round(unix * 1000), step)
                    for name, step, unix, value in some
                ])  # fmt: skip
            except Exception:
                self._held.put_back(some, before)
                state.write(self._folder, self._state)
                raise


begin = MLflow
