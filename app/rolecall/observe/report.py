"""The report of a run, written beside its checkpoints: summary.json, and a picture of the learning curve."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rolecall.config import Settings, __version__
from rolecall.gang.protocol import Key
from rolecall.record import rundir
from rolecall.record.history import History, Point

DRAW_SECONDS = 25.0  # limit; DRAIN_TIMEOUT and this must be less than the 60 s that a container gets to stop
KILL_SECONDS = 1.0  # until a killed process is gone
# secrets, and the settings of a single rank
LEFT_OUT = {"job", "job_token", "job_token_file", "role", "ordinal", "rank", "world_size"}


def summary(
    job: str,
    settings: dict[str, Any],
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
    """The contents of summary.json, as JSON's types.

    `state` is finished, stopped or failed, for `reason`; `members` are those of the last generation; `result` is the
    job's own summary; `now` is Unix time. `score` labels the curve, if `lower`, a lower score is better;
    `unit` is that of the work done.
    """
    done, final = history.last.get("done"), history.last.get("score")
    return {
        "job": job,
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
        "world": dict(Counter(role for role, _ in members)),
        "curve": {
            "label": score,
            "final": _value(final),
            "best": _score(history.least if lower else history.greatest),
            "goal": history.goal,
        },
        "throughput": {
            "unit": unit,
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


class Picture:
    """Draws curve.png in another process: a rank neither loads matplotlib nor fails with it.

    Loading it takes seconds, so `prepare` starts the process while the job trains. It ends with this process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Starts the process."""
        with contextlib.suppress(OSError):  # `draw` tries again
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rolecall.observe.picture", "--on-request", str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        return self._process

    async def draw(self) -> str:
        """Draws the picture of history.jsonl and summary.json. Returns what went wrong, or nothing. Raises OSError."""
        process = self._start()
        try:
            _, output = await asyncio.to_thread(process.communicate, b"draw\n", DRAW_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it took over {DRAW_SECONDS:g} s"
        finally:
            self.close()
        lines = output.decode(errors="replace").strip().splitlines()
        return "" if process.returncode == 0 else lines[-1] if lines else f"exit code {process.returncode}"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stderr):
                with contextlib.suppress(OSError):  # data that it did not read
                    pipe and pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs holds even a killed process
                self._process.wait(KILL_SECONDS)
