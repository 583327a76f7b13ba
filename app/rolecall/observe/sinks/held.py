"""Base of the sinks that cannot take back a point: each point waits until a checkpoint covers its step, so that a
resumed run writes none twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rolecall.observe.sinks.points import Item, Point

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
            content = json.loads((folder / STATE_FILE).read_text())
            last = {str(name): int(step) for name, step in content["last"].items()}
            return cls(str(content["run"]), last, int(content["rows"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Replaces the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{STATE_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(folder / STATE_FILE)


class Held:
    """The points that wait for a checkpoint, for at most `patience` seconds: a job may write no checkpoints.

    If the steps of points that were written are made again, the first value stays. `last` is the newest step written
    of each curve.
    """

    def __init__(self, last: dict[str, int], patience: float) -> None:
        self.last, self._patience = last, patience
        self._held: list[Point] = []
        self._newest: dict[str, int] = {}  # step held of each curve

    def take(self, items: Iterable[Item]) -> None:
        """Adds `items`; repeated ones change nothing."""
        for kind, *rest in items:
            if kind == "start":
                step = rest[0]
                self._held = [point for point in self._held if point.step <= step]
                self._newest = {name: min(newest, step) for name, newest in self._newest.items()}
                continue
            point = Point(*rest)
            if point.step > max(self._newest.get(point.name, -1), self.last.get(point.name, -1)):
                self._newest[point.name] = point.step
                self._held.append(point)

    def due(self, covered: int | None, now: float) -> list[Point]:
        """The points to be written at the Unix time `now`, by step: a checkpoint covers the steps up to `covered`; None
        means all steps."""
        due = [
            point
            for point in self._held
            if covered is None or point.step <= covered or point.unix <= now - self._patience
        ]
        return sorted(due, key=lambda point: point.step)

    def drop(self, points: Iterable[Point]) -> None:
        """Marks `points` as written."""
        written = set(points)
        self._held = [point for point in self._held if point not in written]
        for point in written:
            self.last[point.name] = max(point.step, self.last.get(point.name, -1))

    def put_back(self, points: Iterable[Point], last: dict[str, int]) -> None:
        """Undoes `drop`: `points` were not written, and `last` are the newest steps written."""
        self._held += points
        self.last.clear()
        self.last.update(last)


class HeldSink:
    """A sink in `folder`. A subclass opens its run, whose ID is in `state`, and writes points in `log`."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.state = State.read(folder)
        self.held = Held(self.state.last, patience)
        self._covered = 0

    def log(self, points: list[Point]) -> None:
        """Writes `points`, which `state` counts already. May raise anything."""
        raise NotImplementedError

    def finish(self, state: str, results: dict[str, Any], summary: dict[str, Any] | None) -> None:
        """Ends the run; `results` are the values of the `summary` by dotted name, without settings."""
        raise NotImplementedError

    def write(self, items: list[Item], covered: int) -> None:
        """See `Sink`."""
        self.held.take(items)
        self._covered = covered
        self._send(self.held.due(covered, time.time()))

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        over = state in ("finished", "failed")  # otherwise a resumed run makes the other steps again
        self._send(self.held.due(None if over else self._covered, 0.0))
        self.finish(state, {name: value for name, value in flat(summary or {}) if value is not None}, summary)

    def _send(self, points: list[Point]) -> None:
        for first in range(0, len(points), MAX_POINTS):
            part = points[first : first + MAX_POINTS]
            last, rows = dict(self.state.last), self.state.rows
            self.held.drop(part)
            self.state.rows += len({point.step for point in part})
            self.state.write(self.folder)  # before the points: after a crash in between, none is there twice
            try:
                self.log(part)
            except Exception:
                self.held.put_back(part, last)
                self.state.rows = rows
                self.state.write(self.folder)
                raise


def flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a summary by dotted name, such as `curve.final`, without its settings."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.") if prefix + name != "settings" else ()
        else:
            yield prefix + name, value
