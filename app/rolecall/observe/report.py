"""The report of a run, written beside its checkpoints: summary.json."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rolecall.config import Settings, __version__
from rolecall.declare.describe import Description
from rolecall.gang.protocol import Key
from rolecall.record import rundir
from rolecall.record.history import History, Point

# secrets, and the settings of a single rank
LEFT_OUT = {"job", "job_token", "job_token_file", "role", "ordinal", "rank", "world_size"}


def summary(
    job: Description,
    settings: dict[str, Any],
    history: History,
    state: str,
    reason: str,
    members: Iterable[Key],
    result: dict[str, Any],
    now: float,
) -> dict[str, Any]:
    """The contents of summary.json, as JSON's types.

    `state` is finished, stopped or failed, for `reason`; `members` are those of the last generation; `result` is the
    job's own summary; `now` is Unix time.
    """
    done, final = history.last.get("done"), history.last.get("score")
    return {
        "job": job.name,
        "state": state,
        "reason": reason,
        "version": __version__,
        "torch": importlib.metadata.version("torch"),
        "started": _date(history.began),
        "ended": _date(now),
        "training_seconds": round(history.seconds, 3),
        "steps": max((point.step for point in history.last.values()), default=0),
        "generations": history.generations,
        "restarts": dict(history.ends),
        "ranks_lost": dict(history.lost),
        "ranks_joined": history.joined,
        "workers_stayed": history.stayed,
        "stalled_seconds": {what: round(seconds, 3) for what, seconds in history.stalled.items()},
        "world": dict(Counter(role for role, _ in members)),
        "curve": {
            "label": job.score,
            "final": _value(final),
            "best": _score(history.least if job.lower else history.greatest),
            "goal": history.goal,
        },
        "throughput": {
            "unit": job.unit,
            "total": _value(done),
            "per_second": _number(history.per_second()),
        },
        "result": {name: _number(value) for name, value in result.items()},
        "settings": settings,
    }


def settings_of(shared: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run by variable: `shared` by all jobs, and the job's `values`; without secrets."""
    every = {**shared.model_dump(mode="json", exclude=LEFT_OUT), **values}
    return {name.upper(): _number(value) for name, value in every.items() if value is not None}


def _score(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else {"value": point.value, "step": point.step}


def _value(point: Point | None) -> float | None:
    return None if point is None else point.value


def _number(value: Any) -> Any:
    """`value`, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _date(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None


def write(directory: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json. Raises OSError."""
    rundir.write_atomically(directory / rundir.SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")
