"""A run of MLflow, at MLFLOW_TRACKING_URI, by default in files in CHECKPOINT_DIR/mlflow. A resumed run continues the
run whose ID is in that folder.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from rolecall.observe.sinks.once import OnceSink, State
from rolecall.record.history import Point

MAX_PARAMETERS = 100  # in one call
MAX_TEXT = 500  # characters of a parameter or a tag, which older servers accept
REFUSED = re.compile(r"[^\w\-. :/]")  # in a metric's name
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow(OnceSink):
    """One run."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(Path(about["directory"]) / "mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient()
        parameters = self._resume() if self.state.run else None
        if parameters is None:
            parameters = self._create(about)
        new = [
            self._entities.Param(name, str(value)[:MAX_TEXT])
            for name, value in about["settings"].items()
            if name not in parameters  # a parameter never changes
        ]
        for first in range(0, len(new), MAX_PARAMETERS):
            self._client.log_batch(self.state.run, params=new[first : first + MAX_PARAMETERS])

    def _resume(self) -> set[str] | None:
        """The names of the run's parameters; None if the run does not exist any more."""
        try:
            run = self._client.get_run(self.state.run)
        except importlib.import_module("mlflow.exceptions").MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        self._client.update_run(self.state.run, status="RUNNING")
        return set(run.data.params)

    def _create(self, about: dict[str, Any]) -> set[str]:
        experiment = self._client.get_experiment_by_name(about["experiment"])
        number = experiment.experiment_id if experiment else self._client.create_experiment(about["experiment"])
        tags = {"rolecall.version": about["version"], "rolecall.directory": about["directory"]}
        self.state = State(self._client.create_run(number, run_name=about["title"], tags=tags).info.run_id)
        self.state.write(self.folder)
        return set()

    def log(self, points: list[Point]) -> None:
        """See `OnceSink`."""
        metrics = [
            self._entities.Metric(REFUSED.sub("_", point.name), point.value, round(point.time * 1000), point.step)
            for point in points
        ]
        self._client.log_batch(self.state.run, metrics=metrics)

    def finish(self, state: str, results: dict[str, Any], summary: dict[str, Any] | None) -> None:
        """See `OnceSink`."""
        for name, value in results.items():
            self._client.set_tag(self.state.run, f"rolecall.{name}", str(value)[:MAX_TEXT])
        self._client.set_terminated(self.state.run, STATUS.get(state, "KILLED"))
        if summary is not None:
            self._client.log_dict(self.state.run, summary, "summary.json")


begin = MLflow
