"""The page's state for a run of which only files are left: summary, history and logs. Any of them may be missing or
damaged, as after a kill."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rolecall.declare import registry
from rolecall.errors import UsageError
from rolecall.observe.page import render, state
from rolecall.observe.page.rates import LogEvent
from rolecall.observe.page.state import Titles
from rolecall.record import history, rundir
from rolecall.record.history import History

LOGS = "logs"  # the folder of `rolecall run`
MAX_LOG_BYTES = 2**18  # that are read at the end of a log
MAX_EVENTS = 10  # of one log
MAX_RANKS = 10_000  # of a role
LEVELS = ("warning", "error", "critical")
LINE = re.compile(r"(\d{4}-\S+Z) \[(\w+) *\] (.*)")
RANK = re.compile(r" (role|ordinal)=\S+")  # which the file's name has, too
LEFT_OUT = ("event", "level", "timestamp", "role", "ordinal", "exception")


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
        errors = _errors(directory)
        if summary is not None and (earlier := _earlier(directory, summary)):
            return earlier | {"errors": errors or earlier["errors"]}
        ending = state.Ending(word, reason, errors)
        return state.of_files(titles, ending, run, members, now=now, summary=summary)


def _earlier(directory: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """The state in the page that rank 0 has written with this `summary`, which has the end of each rank, too."""
    try:
        earlier = render.read((directory / rundir.PAGE).read_text())
    except FileNotFoundError:
        return None
    same = earlier is not None and earlier.get("form") == state.FORM and not earlier.get("live")
    return earlier if earlier and same and earlier.get("summary") == state.without_settings(summary) else None


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


# ---- logs


def _errors(directory: Path) -> list[dict[str, Any]]:
    """The last warnings and errors in the logs of `rolecall run`, whose files are called <role>-<ordinal>.log."""
    rows = []
    for path in sorted((directory / LOGS).glob("*.log")):
        role, _, ordinal = path.stem.rpartition("-")
        rows += [state.error(f"{role} {ordinal}", event) for event in [*events(_end(path))][-MAX_EVENTS:]]
    return rows


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")


def events(text: str) -> Iterator[LogEvent]:
    """The warnings and errors in a log, of LOG_FORMAT text or json; a traceback belongs to the event before it."""
    event: LogEvent | None = None
    for line in text.splitlines():
        match = _parse(line)
        if match is None:
            if event:
                event = LogEvent(event.time, event.level, f"{event.text}\n{line}")
            continue
        if event:
            yield event
        moment, level, words = match
        event = LogEvent(moment, level, words) if level in LEVELS else None
    if event:
        yield event


def _parse(line: str) -> tuple[float, str, str] | None:
    """Unix time, level and text of a line that begins an event."""
    try:
        if match := LINE.fullmatch(line):
            return datetime.fromisoformat(match[1]).timestamp(), match[2], RANK.sub("", match[3])
        fields = json.loads(line)
        words = [str(fields["event"])] + [f"{name}={value}" for name, value in fields.items() if name not in LEFT_OUT]
        text = " ".join(words) + (f"\n{fields['exception']}" if fields.get("exception") else "")
        return datetime.fromisoformat(fields["timestamp"]).timestamp(), str(fields["level"]), text
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
