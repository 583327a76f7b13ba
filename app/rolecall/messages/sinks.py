"""From rank 0's supervisor to the standard input of a sink's process: a line of JSON each."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Open(Struct, frozen=True):
    """The first message: the argument of the sink's `begin`, and where the rows of this process begin in the run's
    history."""

    about: dict[str, Any]
    offset: int = 0


class End(Struct, frozen=True):
    """The last message: the run is finished, failed or stopped; `summary` is the contents of its summary.json."""

    state: str
    summary: dict[str, Any] | None = None
