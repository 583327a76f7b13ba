"""The state that the page shows, as JSON.

Pure: no I/O, no clock. Any text may come from a job; the page shows it as text only.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rolecall.declare.describe import Description
from rolecall.gang.protocol import ACTIVE, MET, OVER, Key, WorkerStatus, name_of
from rolecall.observe.page.rates import LogEvent, Rates
from rolecall.record.history import CURVES, History

FORM = 1  # version of the state: raised if the script of another version cannot show it
MAX_GENERATIONS = 200  # the newest
MAX_ERRORS = 60  # the newest, of all ranks
MAX_TEXT = 2000  # characters of an error
BAD = ("failed", "crashed", "stuck", "killed", "silent", "lost", "refused", "unreachable")  # how a worker may end
WAITING = {"none": "waiting", "joining": "starting"}


@dataclass(frozen=True)
class MemberView:
    """A rank in the gang: its worker, the seconds since its last heartbeat, and its node."""

    worker: WorkerStatus = field(default_factory=WorkerStatus)
    heard: float = 0.0
    leaving: bool = False
    node: str = ""


@dataclass(frozen=True)
class GangView:
    """The gang: its state for `seconds`, the reason, and the ranks that a start waits for; the newest generation's
    number, its members in order of rank, why it lost some of them, and who joins it."""

    state: str
    reason: str = ""
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    number: int = 0
    ranks: tuple[Key, ...] = ()
    lost: Mapping[Key, str] = field(default_factory=dict)
    joining: frozenset[Key] = frozenset()
    members: Mapping[Key, MemberView] = field(default_factory=dict)


def of_gang(
    job: Description,
    gang: GangView,
    history: History,
    rates: Rates,
    *,
    settings: Mapping[str, Any],
    now: float,
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a run under way, or just over, at the Unix time `now`. `summary` is the contents of summary.json."""
    roles, over = job.roles, gang.state in OVER
    rank0 = (roles[0].name, 0)
    values = rates.values(rank0)
    everyone = {(role.name, ordinal) for role in roles for ordinal in range(role.count)}
    places = {role.name: place for place, role in enumerate(roles)}
    keys = sorted(everyone | {*gang.members, *(() if over else gang.ranks)}, key=lambda key: (places[key[0]], key[1]))
    minimum = {role.name: role.minimum for role in roles}
    return _object(
        {
            **_common(job, history, settings, now, summary),
            "live": True,
            "state": gang.state,
            "state_seconds": gang.seconds,
            "reason": last_line(gang.reason),
            "missing": [*gang.missing],
            "generation": gang.number,
            "step": max([int(values.get("step", 0)), *(point.step for point in history.last.values())], default=0),
            "left_seconds": None if over else values.get("left_seconds"),
            "done_per_second": rates.per_second(rank0, lambda report: report.values.get("done_total")),
            "roles": [asdict(role) for role in roles],
            "ranks": [_rank(key, gang, rates, over, key[1] < minimum[key[0]]) for key in keys],
            "links": [asdict(link) for link in rates.links()],
            "queues": [asdict(queue) for queue in rates.queues()],
            "weights": [asdict(weights) for weights in rates.weights()],
            "logged": {name: point.value for name, point in history.last.items() if name not in CURVES},
            "errors": _errors((key, report.log) for key in keys if (report := rates.newest(key))),
        }
    )


def ended(shown: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run whose last state was `shown`, and which ended with `summary`."""
    end = {"live": False, "state": summary["state"], "reason": last_line(summary["reason"]), "missing": []}
    here = [rank for rank in shown["ranks"] if rank["health"] != "bad" and rank["word"] != "finished"]
    left = {rank["name"]: {**rank, "word": "has left", "health": "idle", "phase": ""} for rank in here}
    ranks = [left.get(rank["name"], rank) for rank in shown["ranks"]]
    return _object({**shown, **end, "ranks": ranks, "left_seconds": None, "summary": without_settings(summary)})


def _errors(logs: Iterable[tuple[Key, Iterable[LogEvent]]]) -> list[dict[str, Any]]:
    """The newest warnings and errors in the ranks' logs."""
    every = [
        {"rank": name_of(key), **asdict(event), "text": event.text[-MAX_TEXT:]} for key, log in logs for event in log
    ]
    return sorted(every, key=lambda each: each["time"])[-MAX_ERRORS:]


def _common(
    job: Description, history: History, settings: Mapping[str, Any], now: float, summary: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "form": FORM,
        "now": now,
        "job": {
            "job": job.name,
            "summary": job.summary,
            "score": job.score,
            "unit": job.unit,
            "lower": job.lower,
            "version": job.version,
        },
        "curve": history.shown(),
        "training_seconds": history.seconds,
        "began": history.began or None,
        "generations": generations(history),
        "generation_count": history.generations,
        "ends": dict(history.ends),
        "ranks_lost": dict(history.lost),
        "ranks_joined": history.joined,
        "workers_stayed": history.stayed,
        "per_second": history.per_second(),
        "settings": dict(settings),
        "summary": None if summary is None else without_settings(summary),
    }


def without_settings(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without the settings, which the state has elsewhere."""
    return {name: value for name, value in summary.items() if name != "settings"}


def generations(history: History) -> list[dict[str, Any]]:
    """The generations, oldest first: their first step, beginning and end (Unix seconds), the cause, the ranks that were
    lost or joined, and how many workers stayed when it began."""
    starts = {start.generation: start for start in history.starts}
    after = {start.generation: following for start, following in itertools.pairwise(history.starts)}
    ends = {event.generation: event for event in history.events if event.what == "ended"}
    stayed = {event.generation: event.count for event in history.events if event.what == "stayed"}
    lost, joined = defaultdict[int, list[dict[str, Any]]](list), defaultdict[int, list[dict[str, Any]]](list)
    for event in history.events:
        row = {"time": event.time, "reason": event.reason}
        if event.what == "lost":
            lost[event.generation].append(row | {"cause": event.cause})
        elif event.what == "joined":
            joined[event.generation].append(row | {"count": event.count})
    rows = []
    for number in sorted({*starts, *ends}):  # a generation may end before it trains
        start, end, following = starts.get(number), ends.get(number), after.get(number)
        rows.append(
            {
                "number": number,
                "step": start.step if start else None,
                "began": start.time if start else None,
                "ended": end.time if end else following.time if following else None,
                "cause": end.cause if end else following.after if following else "",
                "reason": end.reason if end else "",
                "lost": lost[number],
                "joined": joined[number],
                "stayed": stayed.get(number, 0),
            }
        )
    return rows[-MAX_GENERATIONS:]


def _rank(key: Key, gang: GangView, rates: Rates, over: bool, needed: bool) -> dict[str, Any]:
    """One rank: `health` is good, idle or bad; `word` is the reason."""
    member, report = gang.members.get(key), rates.newest(key)
    health, word = _state(key, gang, over, needed)
    row: dict[str, Any] = {"name": name_of(key), "role": key[0], "ordinal": key[1], "word": word, "health": health}
    if member is None:
        return row
    worker = member.worker
    values = report.values if report else {}
    return row | {
        "generation": worker.generation or None,
        "phase": worker.phase,
        "node": member.node,
        "heard_seconds": round(member.heard, 1),
        "calls_per_second": rates.calls(key),
        "worker_bytes": values.get("worker_bytes"),
        "supervisor_bytes": values.get("supervisor_bytes"),
        "worker_starts": values.get("worker_starts"),
        "error": last_line(worker.error) if worker.state == "ended" else "",
        "problem": rates.problems.get(key, ""),
    }


def _state(key: Key, gang: GangView, over: bool, needed: bool) -> tuple[str, str]:
    """A rank's health, and the words for its state."""
    member, cause = gang.members.get(key), gang.lost.get(key, "")
    if member is None:
        if over:
            return "idle", "has left"
        if cause:
            return ("idle", "has left") if cause == "left" else ("bad", f"lost: {cause}")
        return ("bad", "missing") if needed else ("idle", "not started")
    worker = member.worker
    if key in gang.joining:
        doing = worker.phase or worker.state
        return "idle", "joining" if doing in ("none", "ended") else f"joining ({doing})"
    if worker.state == "ended" and worker.outcome in BAD:
        return "bad", worker.outcome
    if cause not in ("", "left") and gang.state in ACTIVE and not member.leaving:
        return "bad", f"lost: {cause}"  # until it joins again, or the next generation begins
    if worker.state == "ended":
        return ("good" if worker.outcome == "finished" else "idle"), worker.outcome or "ended"
    if member.leaving:
        return "idle", "leaving"
    if worker.state in MET:
        return "good", worker.phase or "running"
    return "idle", worker.phase or WAITING.get(worker.state, worker.state)


def last_line(text: str) -> str:
    """The last line of a text, such as the error itself of a traceback, shortened."""
    return (text.strip().splitlines() or [""])[-1][:MAX_TEXT]


def _object(values: dict[str, Any]) -> dict[str, Any]:
    """`values` as JSON's types, with None for NaN and infinity, which JSON does not have."""
    return dict(json.loads(json.dumps(values), parse_constant=lambda _: None))
