"""Calls per second and their latency, from the counters in ranks' reports. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolecall.gang.protocol import Key
from rolecall.telemetry import LATENCY

WINDOW_REPORTS = 6  # over which a rate is measured
MAX_METHODS = 200  # of one rank
MAX_EVENTS = 8
MAX_TEXT = 2000  # characters of an event's text
COUNTS = ("calls", "failures", "sent", "received")


@dataclass(frozen=True)
class Method:
    """A method's counters at its caller: `counts` are those of COUNTS; `buckets` are the numbers of calls that took at
    most each of LATENCY's bounds (seconds), and of all calls. `roles` are the callees'."""

    counts: tuple[float, ...]
    buckets: tuple[float, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class LogEvent:
    """A warning or an error in a rank's log, with its Unix time."""

    time: float
    level: str
    text: str


@dataclass(frozen=True)
class Report:
    """A supervisor's report. `started` identifies its process; `at` is the time in seconds of that process's clock."""

    started: float
    at: float
    methods: dict[str, Method] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    log: tuple[LogEvent, ...] = ()


@dataclass(frozen=True)
class Link:
    """The calls of one method from the role `caller` to `callees`, if known: calls, failures and bytes per second, and
    latency in seconds."""

    caller: str
    callees: tuple[str, ...]
    method: str
    calls: float
    failures: float
    sent: float
    received: float
    p50: float | None
    p99: float | None


def read(reply: Any) -> Report:
    """The report in a supervisor's reply. Raises ValueError, KeyError, TypeError or AttributeError if it has none."""
    if "error" in reply:
        raise ValueError(str(reply["error"]))
    methods = {}
    for name, counters in [*reply["methods"].items()][:MAX_METHODS]:
        buckets = _numbers(counters["buckets"])
        if len(buckets) != len(LATENCY) + 1:
            raise ValueError("it counts latency in other buckets")
        roles = tuple(sorted(str(role) for role in counters["roles"]))
        methods[str(name)] = Method(_numbers(counters[count] for count in COUNTS), buckets, roles)
    log = tuple(
        LogEvent(_number(moment), str(level)[:20], str(text)[-MAX_TEXT:])
        for moment, level, text in [*reply["log"]][-MAX_EVENTS:]
    )
    values = {str(name): _number(value) for name, value in reply["values"].items() if _is_finite(value)}
    return Report(_number(reply["started"]), _number(reply["at"]), methods, values, log)


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    if not _is_finite(value):
        raise ValueError("a number is missing")
    return float(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Rates:
    """The newest reports of each rank, and the rates from them."""

    def __init__(self) -> None:
        self.reports: dict[Key, deque[Report]] = {}
        self.problems: dict[Key, str] = {}  # why a rank's newest report is missing

    def take(self, replies: Mapping[Key, Any], members: Collection[Key]) -> None:
        """Takes the replies of some ranks; forgets ranks that are not `members` any more."""
        self.reports = {key: reports for key, reports in self.reports.items() if key in members}
        self.problems = {key: problem for key, problem in self.problems.items() if key in members}
        for key, reply in replies.items():
            self.problems.pop(key, None)
            try:
                report = read(reply)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                self.problems[key] = str(error) if isinstance(error, ValueError) else "its statistics cannot be read"
                continue
            reports = self.reports.setdefault(key, deque(maxlen=WINDOW_REPORTS))
            if reports and (report.started != reports[-1].started or report.at <= reports[-1].at):
                reports.clear()  # its counters restarted
            reports.append(report)

    def newest(self, key: Key) -> Report | None:
        """A rank's newest report."""
        reports = self.reports.get(key)
        return reports[-1] if reports else None

    def values(self, key: Key) -> dict[str, float]:
        """A rank's newest values by name: gauges and counters."""
        report = self.newest(key)
        return report.values if report else {}

    def per_second(self, key: Key, of: Callable[[Report], float | None]) -> float | None:
        """The growth of a rank's counter per second; None without two reports of it."""
        reports = self.reports.get(key)
        if reports is None or len(reports) < 2:
            return None
        before, after = of(reports[0]), of(reports[-1])
        if before is None or after is None or after < before:
            return None
        return (after - before) / (reports[-1].at - reports[0].at)

    def calls(self, key: Key) -> float | None:
        """The remote calls of a rank per second."""
        return self.per_second(key, lambda report: sum(method.counts[0] for method in report.methods.values()))

    def links(self) -> list[Link]:
        """The calls between roles, the most frequent first."""
        grown: dict[tuple[str, str], list[float]] = {}
        callees: dict[tuple[str, str], set[str]] = {}
        for (role, _), reports in self.reports.items():
            for name, method in reports[-1].methods.items():
                callees.setdefault((role, name), set()).update(method.roles)
                more = _grown(name, reports[0], reports[-1])
                total = grown.setdefault((role, name), [0.0] * len(more))
                grown[role, name] = [one + other for one, other in zip(total, more, strict=True)]
        links = []
        for (role, name), roles in callees.items():
            calls, failures, sent, received, *answered = grown[role, name]
            links.append(
                Link(
                    role,
                    tuple(sorted(roles)),
                    name,
                    calls=calls,
                    failures=failures,
                    sent=sent,
                    received=received,
                    p50=quantile(0.5, answered),
                    p99=quantile(0.99, answered),
                )
            )
        return sorted(links, key=lambda link: (-link.calls, link.caller, link.method))


def _grown(name: str, before: Report, after: Report) -> list[float]:
    """The growth per second of a method's counts and buckets between two reports; zeros if it is unknown."""
    old, new = before.methods.get(name), after.methods[name]
    nothing = [0.0] * (len(COUNTS) + len(LATENCY) + 1)
    if old is None or after.at <= before.at:
        return nothing
    pairs = zip(new.counts + new.buckets, old.counts + old.buckets, strict=True)
    rates = [(one - other) / (after.at - before.at) for one, other in pairs]
    return nothing if min(rates) < 0 else rates  # a torn file of counters was dropped


def quantile(share: float, cumulative: Sequence[float], bounds: Sequence[float] = LATENCY) -> float | None:
    """The quantile `share` of a histogram, by linear interpolation in its bucket; the last bound if it lies above that.
    None if the histogram is empty. See Prometheus's `histogram_quantile`."""
    if not cumulative or cumulative[-1] <= 0:
        return None
    wanted = share * cumulative[-1]
    place = bisect_left(cumulative, wanted)
    if place >= len(bounds):
        return bounds[-1]
    low, below = (bounds[place - 1], cumulative[place - 1]) if place else (0.0, 0.0)
    return low + (bounds[place] - low) * (wanted - below) / (cumulative[place] - below)
