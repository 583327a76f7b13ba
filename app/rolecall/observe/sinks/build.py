"""The sinks of a run, as its settings ask for them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from rolecall import config
from rolecall.config import Settings, __version__
from rolecall.observe.sinks.choice import choose
from rolecall.observe.sinks.feed import Covered, Feed, Sinks

TOKEN = "JOB_TOKEN"  # no sink needs it
PATIENCE = 60.0  # seconds that a point waits for its checkpoint at least
INTERVALS = 3  # or this many intervals between checkpoints


def build(
    settings: Settings, job: str, values: dict[str, Any], secrets: Collection[str], covered: Covered
) -> Sinks:  # fmt: skip
    """The sinks of SINKS. `values` are the run's settings by variable, without secrets; `secrets` are the fields of
    those, which no sink's process gets; `covered` tells the step of the newest checkpoint. Raises UsageError for a sink
    that does not exist, or is not installed.
    """
    names = choose(settings.sinks)
    if not names:
        return Sinks([])
    directory = settings.checkpoint_dir.absolute()
    about = {
        "directory": str(directory),
        "title": f"{job} {datetime.now(UTC):%Y-%m-%d %H:%M}",
        "experiment": config.exported("MLFLOW_EXPERIMENT_NAME") or job,
        "project": config.exported("WANDB_PROJECT") or job,
        "settings": values,
        "version": __version__,
        "patience": max(PATIENCE, INTERVALS * settings.checkpoint_interval),
    }
    # the libraries' own variables, where the user has not set them
    defaults = {
        "MLFLOW_TRACKING_URI": (directory / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow would rather have a database, which mlflow-skinny lacks
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # it is tried again later, too
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
    }
    chosen = {name: config.exported(name) or value for name, value in defaults.items()}
    environment = config.child_environment(**chosen)
    for secret in (TOKEN, *map(str.upper, secrets)):
        environment.pop(secret, None)
    return Sinks([Feed(name, about, environment, covered) for name in names])
