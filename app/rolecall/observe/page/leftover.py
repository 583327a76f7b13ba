"""The page's state for a run of which only files are left: summary and history. Any of them may be missing or damaged,
as after a kill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rolecall.declare import registry
from rolecall.errors import UsageError
from rolecall.observe.page import state
from rolecall.observe.page.state import Titles
from rolecall.record import history, rundir
from rolecall.record.history import History

MAX_RANKS = 10_000  # of a role


def read(directory: Path, now: float) -> dict[str, Any]:
    """The page's state for the run in `directory` at the Unix time `now`. Raises UsageError if there was no run, or it
    cannot be read."""
    problem = f"RUN_DIRECTORY={directory}"
    if not directory.is_dir():
        raise UsageError(f"{problem}: no such folder; name a run's CHECKPOINT_DIR")
    with UsageError.wrap(f"{problem}: cannot be read", OSError):
        run, summary = history.read(directory), rundir.read_summary(directory)
        persisted = rundir.read_generation(directory)
        if not run.generations and not persisted.number and summary is None:
            raise UsageError(f"{problem}: holds no run; name a run's CHECKPOINT_DIR")
        word, reason = _ending(directory, run, summary)
        titles = _titles(persisted.job, summary)
        members = Counter(role for role, _ in persisted.members) or _world(summary)
        return state.of_files(titles, word, reason, run, members, now=now, summary=summary)


def _ending(directory: Path, run: History, summary: dict[str, Any] | None) -> tuple[str, str]:
    """The run's final state, and the reason."""
    if _is_running(directory):
        return "running", "the run is under way: rank 0 shows it at its METRICS_PORT"
    if summary and summary.get("generations") == run.generations:
        return str(summary.get("state", "stopped")), str(summary.get("reason", ""))
    if done := rundir.read_failed(directory):
        return "failed", done.reason
    if rundir.read_done(directory) is not None:
        return "finished", ""
    return "killed", "rank 0 ended without a report"


def _is_running(directory: Path) -> bool:
    """Whether a rank 0 holds the directory."""
    path = directory / rundir.COORDINATOR_LOCK
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:  # a read-only directory
        return False


def _world(summary: dict[str, Any] | None) -> Counter[str]:
    """The number of ranks by role in a summary."""
    world = (summary or {}).get("world", {})
    return Counter({role: count for role, count in world.items() if type(count) is int and 0 < count <= MAX_RANKS})


def _titles(name: str, summary: dict[str, Any] | None) -> Titles:
    summary = summary or {}
    curve, throughput = summary.get("curve") or {}, summary.get("throughput") or {}
    job = registry.get(name) if name in registry.JOBS else None
    return Titles(
        job=str(summary.get("job") or name or "a job"),
        summary=job.summary if job else "",
        score=str(curve.get("label") or (job.score if job else "score")),
        unit=str(throughput.get("unit") or (job.unit if job else "steps")),
        lower=bool(job and job.lower),
        version=str(summary.get("version", "")),
    )
