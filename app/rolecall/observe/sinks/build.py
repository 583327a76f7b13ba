"""Builds the sinks of a run from its settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from rolecall import config
from rolecall.config import Settings, __version__
from rolecall.errors import UsageError
from rolecall.observe.sinks.feed import Feed, Sinks

KINDS = ("tensorboard", "mlflow", "wandb")  # each is the name of its package, of its extra and of its module here


def build(settings: Settings, job: str, values: dict[str, Any], secrets: Collection[str]) -> Sinks:
    """The sinks of SINKS. `values` are the run's settings by variable, without secrets; `secrets` names the secret
    ones, which are removed from the sinks' environment. Raises UsageError for a sink that does not exist or is not
    installed.
    """
    names = choose(settings.sinks)
    directory = settings.checkpoint_dir.absolute()
    about = {
        "directory": str(directory),
        "title": f"{job} {datetime.now(UTC):%Y-%m-%d %H:%M}",
        "experiment": config.exported("MLFLOW_EXPERIMENT_NAME") or job,
        "project": config.exported("WANDB_PROJECT") or job,
        "settings": values,
        "version": __version__,
    }
    # the libraries' variables, unless the user has set them
    defaults = {
        "MLFLOW_TRACKING_URI": (directory / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow prefers a database, which mlflow-skinny lacks
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the sink tries again, too
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
    }
    environment = config.child_environment(**{name: config.exported(name) or defaults[name] for name in defaults})
    for secret in ("JOB_TOKEN", *map(str.upper, secrets)):
        environment.pop(secret, None)
    return Sinks([Feed(name, about, environment) for name in names])


def choose(setting: str) -> tuple[str, ...]:
    """The sinks of SINKS=`setting`, each once. Raises UsageError for one that does not exist or is not installed."""
    if setting == "none":
        return ()
    if setting == "auto":
        return ("tensorboard",) if is_installed("tensorboard") else ()
    names = tuple(dict.fromkeys(part.strip() for part in setting.split(",") if part.strip()))
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise UsageError(
            f"SINKS={setting}: {', '.join(unknown) or 'nothing'} is no sink; give auto, none, or some of "
            f"{','.join(KINDS)}, separated by commas"
        )
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise UsageError(
            f"SINKS={setting}: {' and '.join(missing)} cannot be imported; at rank 0, "
            f"`pip install 'rolecall[{','.join(missing)}]'`, or leave it out"
        )
    return names


def is_installed(name: str) -> bool:
    """Whether the package `name` can be imported; a folder of that name, such as wandb leaves behind, cannot."""
    try:
        package = importlib.util.find_spec(name)
    except ValueError:
        return False
    return package is not None and package.origin is not None
