"""Histories that tests invent."""

from __future__ import annotations

from pathlib import Path

from rolecall.record.files import Disk
from rolecall.record.history import Event, Journal, Point, Row


def journal(directory: Path = Path("/none")) -> Journal:
    """A run's journal; without a directory it is empty, and not written."""

    def complain(problem: str) -> None:
        print(f"history cannot be written: {problem}")

    return Journal(directory, Disk(), complain)


def ended(cause: str, generation: int = 1, reason: str = "") -> Event:
    return Event("ended", generation, cause, reason)


def steps(*numbers: int, name: str = "score", at: float = 0.0) -> list[Row]:
    """A point a second, whose value is ten times its step."""
    return [Point(name, step, 10.0 * step, at + place + 1) for place, step in enumerate(numbers)]
