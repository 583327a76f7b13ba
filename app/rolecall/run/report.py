"""What stands beside the checkpoints at the end of a run: summary.json, and a picture of its learning curve."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rolecall.config import Settings, __version__
from rolecall.gang.protocol import Key
from rolecall.run import rundir
from rolecall.run.history import History, Point

DRAWING = 15.0  # seconds; with DRAIN_TIMEOUT before it, less than what stops a container
# secrets, and what is of one rank alone
LEFT_OUT = {"job", "job_token", "job_token_file", "role", "ordinal", "rank", "world_size"}


def summary(
    job: str,
    settings: Settings,
    history: History,
    state: str,
    reason: str,
    members: Iterable[Key],
    result: dict[str, Any],
    now: float,
    *,
    score: str,
    unit: str,
    lower: bool,
) -> dict[str, Any]:
    """What became of a run, as JSON's types. `state` is finished, stopped or failed, for `reason`; `members` are those
    of the last generation, `result` is the job's own summary, `now` Unix time.
    """
    done, final = history.last.get("done"), history.last.get("score")
    return {
        "job": job,
        "state": state,
        "reason": reason,
        "version": __version__,
        "torch": importlib.metadata.version("torch"),
        "started": _moment(history.began),
        "ended": _moment(now),
        "training_seconds": round(history.seconds, 3),
        "steps": max((point.step for point in history.last.values()), default=0),
        "generations": history.generations,
        "restarts": dict(history.ends),
        "ranks_lost": dict(history.lost),
        "world": dict(Counter(role for role, _ in members)),
        "curve": {
            "label": score,
            "final": _value(final),
            "best": _told(history.least if lower else history.greatest),
            "goal": history.goal,
        },
        "throughput": {
            "unit": unit,
            "total": _value(done),
            "per_second": _number(history.per_second()),
        },
        "result": {name: _number(value) for name, value in result.items()},
        "settings": {
            name.upper(): value
            for name, value in settings.model_dump(mode="json", exclude=LEFT_OUT).items()
            if value is not None
        },
    }


def _told(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else {"value": point.value, "step": point.step}


def _value(point: Point | None) -> float | None:
    return None if point is None else point.value


def _number(value: Any) -> Any:
    """JSON knows no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _moment(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None


def write(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json. Raises OSError where the directory does not take it."""
    rundir.write_atomically(directory / rundir.SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")


async def draw(directory: Path) -> str:
    """Have the picture drawn, by a process of its own. Returns what went wrong, or nothing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rolecall.run.picture", str(directory),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DRAWING):
            _, said = await process.communicate()
    except TimeoutError:
        return f"it took over {DRAWING:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"
