"""A run's trace as one file, with the generations and losses of the run's history."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import UsageError
from rolecall.observe.trace import perfetto
from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.perfetto import Moment
from rolecall.record import history, records
from rolecall.record.history import History

NAME = "trace.json"


@dataclass(frozen=True)
class Written:
    """The file, its number of spans, and a line for each part that was left out."""

    path: Path
    spans: int
    problems: list[str]


def moments(run: History) -> list[Moment]:
    """The generations of a run, and why each ended."""
    happened, details = list[Moment](), dict[str, Any]()
    ends = {event.generation: event.time for event in run.events if event.what == "ended"}
    for start in run.starts:
        length = max(0.0, ends.get(start.generation, 0.0) - start.time)
        details = {"after step": start.step} | ({"after": start.after} if start.after else {})
        happened.append(Moment(f"generation {start.generation}", start.time, length, details))
    for event in run.events:
        name = f"generation {event.generation} ended" if event.what == "ended" else "lost"
        details = {"generation": event.generation, "cause": event.cause}
        happened.append(Moment(f"{name}: {event.cause}", event.time, details={**details, "reason": event.reason}))
    return happened


def history_beside(folder: Path) -> History:
    """The history of the run whose spans are in `folder`; empty if there is none."""
    directory = folder.parent if folder.name == records.FOLDER else folder
    with UsageError.wrap(f"{directory}: the run's history cannot be read", OSError):
        return history.read(directory)


def write(calls: Calls, output: Path, run: History | None = None) -> Written:
    """Writes the spans of `calls`, and what happened to the `run`, to the file `output`, as a whole or not at all.

    Raises UsageError if that is not possible.
    """
    temporary = output.with_name(f".{output.name}.tmp")
    with UsageError.wrap(f"{output}: cannot be written", OSError):
        try:
            temporary.unlink(missing_ok=True)  # may be a link in a directory from elsewhere
            with temporary.open("w") as file:
                spans = perfetto.write(calls, moments(run) if run else [], file)
            temporary.replace(output)
        finally:
            temporary.unlink(missing_ok=True)
    return Written(output, spans, calls.trace.damage())
