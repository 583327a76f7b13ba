"""Base of the sinks that cannot take back a point: of a step that a resumed run makes again, the first value stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rolecall.record.history import Point, Row

STATE_FILE = "rolecall.json"
MAX_POINTS = 1000  # in one call of the library


@dataclass
class State:
    """The state that a sink's folder keeps between processes: the run's ID in the library, the newest step written of
    each curve, and how many rows (steps) were written."""

    run: str = ""
    last: dict[str, int] = field(default_factory=dict)
    rows: int = 0

    @classmethod
    def read(cls, folder: Path) -> State:
        """The state that `write` wrote; empty if there is none, or the file is damaged. Raises OSError."""
        try:
            return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=cls)
        except (FileNotFoundError, ValueError, RecursionError):
            return cls()

    def write(self, folder: Path) -> None:
        """Replaces the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{STATE_FILE}.tmp"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / STATE_FILE)


class OnceSink:
    """A sink in `folder`. A subclass opens its run, whose ID is in `state`, and writes points in `log`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State.read(folder)

    def log(self, points: list[Point]) -> None:
        """Writes `points`, in order of steps, which `state` counts already. May raise anything."""
        raise NotImplementedError

    def finish(self, state: str, results: dict[str, Any], summary: dict[str, Any] | None) -> None:
        """Ends the run; `results` are the values of the `summary` by dotted name, without settings."""
        raise NotImplementedError

    def write(self, rows: list[Row]) -> None:
        """See `Sink`."""
        newest, points = dict(self.state.last), list[Point]()
        for point in rows:
            if isinstance(point, Point) and point.step > newest.get(point.name, -1):
                newest[point.name] = point.step
                points.append(point)
        points.sort(key=lambda point: point.step)
        for first in range(0, len(points), MAX_POINTS):
            self._send(points[first : first + MAX_POINTS])

    def _send(self, points: list[Point]) -> None:
        before, rows = self.state, len({point.step for point in points})
        last = before.last | {point.name: point.step for point in points}
        self.state = State(before.run, last, before.rows + rows)
        self.state.write(self.folder)  # before the points: after a crash in between, none is there twice
        try:
            self.log(points)
        except Exception:
            self.state = before
            before.write(self.folder)
            raise

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        self.finish(state, {name: value for name, value in flat(summary or {}) if value is not None}, summary)


def flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a summary by dotted name, such as `curve.final`, without its settings."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.") if prefix + name != "settings" else ()
        else:
            yield prefix + name, value
