"""Builds and loads tables of all kinds."""

from __future__ import annotations

from typing import Any

from rolecall.jobs.hybrid import HybridSettings, hashed_saved
from rolecall.jobs.hybrid.disk import DiskTable
from rolecall.jobs.hybrid.disk_log import Scratch
from rolecall.jobs.hybrid.hashed import HashedTable
from rolecall.jobs.hybrid.table import Table


def build(settings: HybridSettings, ordinal: int, scratch: Scratch | None = None) -> Table:
    """The table of server `ordinal` without values, with its rows in `scratch` if it is given."""
    if scratch is not None:
        return DiskTable(settings, ordinal, scratch, settings.hot_rows)
    return (HashedTable if settings.table == "hashed" else Table)(settings, ordinal)


def load(settings: HybridSettings, columns: dict[str, Any], step: int) -> Table:
    """The whole table of a checkpoint made after `step` steps, from its tensors. Raises KeyError, RuntimeError or
    UsageError if they are of another kind of table.
    """
    changes: dict[str, Any] = {"servers": 1}
    if settings.table == "hashed":
        shapes = {name: tuple(tensor.shape) for name, tensor in columns.items()}
        changes["max_rows"] = max(1, hashed_saved.count(shapes))
    table = build(settings.model_copy(update=changes), 0)
    table.load(columns)
    table.start(step)
    return table
