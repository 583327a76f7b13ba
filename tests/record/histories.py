"""The file of a history that a test invents."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolecall.record import rundir
from rolecall.record.history import History


def rows(run: History) -> list[dict[str, Any]]:
    """Rows that make this history, through JSON."""
    made: list[dict[str, Any]] = [{"kind": "start", **asdict(start)} for start in run.starts]
    made += [{"kind": "event", **asdict(event)} for event in run.events]
    made += [{"kind": kind, **asdict(point)} for kind, points in run.curves.items() for point in points]
    made += [] if run.goal is None else [{"kind": "goal", "value": run.goal}]
    return [json.loads(json.dumps(row)) for row in made]


def write(directory: Path, run: History, torn: str = "") -> None:
    (directory / rundir.HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows(run)) + torn)
