"""Which sinks SINKS asks for."""

from __future__ import annotations

import importlib.util

from rolecall.errors import UsageError

KINDS = ("tensorboard", "mlflow", "wandb")  # each is the name of its package, of its extra and of its module here
AUTO, NONE = "auto", "none"


def choose(setting: str) -> tuple[str, ...]:
    """The sinks of SINKS=`setting`, each once. Raises UsageError for one that does not exist or is not installed."""
    if setting == NONE:
        return ()
    if setting == AUTO:
        return ("tensorboard",) if is_installed("tensorboard") else ()
    names = tuple(dict.fromkeys(part.strip() for part in setting.split(",") if part.strip()))
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise UsageError(
            f"SINKS={setting}: {', '.join(unknown) or 'nothing'} is no sink; give {AUTO}, {NONE}, or some of "
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
    """Whether there is a package `name`; a folder of that name, such as wandb leaves behind, is none."""
    try:
        package = importlib.util.find_spec(name)
    except ValueError:
        return False
    return package is not None and package.origin is not None
