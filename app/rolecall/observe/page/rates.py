"""Calls, queues and weights, from the gauges and counters in ranks' reports. Pure: no I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from rolecall.gang.protocol import Key, name_of
from rolecall.messages.codec import MessageError, convert
from rolecall.record.history import Finite
from rolecall.telemetry import LATENCY

WINDOW_REPORTS = 6  # over which a rate is measured
BUCKETS = len(LATENCY) + 1
COUNTS = ("calls", "failures", "sent", "received")


@dataclass(frozen=True)
class Method:
    """A method's counters at its caller. `buckets` are the numbers of calls that took at most each of LATENCY's bounds
    (seconds), and of all calls. `roles` are the callees'."""

    calls: Finite = 0.0
    failures: Finite = 0.0
    sent: Finite = 0.0
    received: Finite = 0.0
    buckets: Annotated[list[Finite], Meta(min_length=BUCKETS, max_length=BUCKETS)] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)

    @property
    def counters(self) -> list[float]:
        """All of them."""
        return [self.calls, self.failures, self.sent, self.received, *self.buckets]


@dataclass(frozen=True)
class QueueCounters:
    """A queue at its owner: the items in it, the most that it may have, and the items put so far."""

    depth: Finite = 0.0
    size: Finite = 0.0
    items: Finite = 0.0


@dataclass(frozen=True)
class WeightsCounters:
    """Weights at a member: the version that it has, None before the first, and the bytes that it received and that did
    not need to travel."""

    version: Finite | None = None
    received: Finite = 0.0
    saved: Finite = 0.0


@dataclass(frozen=True)
class LogEvent:
    """A warning or an error in a rank's log, with its Unix time."""

    time: Finite
    level: str
    text: str


@dataclass(frozen=True)
class Stats:
    """The statistics of a rank. The Unix time `started` identifies its supervisor; `at` is the time in seconds of that
    process's clock; `values` are gauges and counters."""

    started: Finite
    at: Finite
    methods: dict[str, Method]
    values: dict[str, Finite]
    log: list[LogEvent]
    queues: dict[str, QueueCounters] = field(default_factory=dict)
    weights: dict[str, WeightsCounters] = field(default_factory=dict)


@dataclass(frozen=True)
class CallRate:
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


@dataclass(frozen=True)
class QueueUse:
    """A queue at the rank `owner`: the items in it of at most `size`, and the items put per second, None if unknown."""

    name: str
    owner: str
    depth: float
    size: float
    items: float | None


@dataclass(frozen=True)
class WeightsUse:
    """Weights at the members that have a version: the newest one, the oldest one and who has it, and the bytes that
    all received and that did not need to travel."""

    name: str
    members: int
    newest: float
    oldest: float
    oldest_at: str
    received: float
    saved: float


class Rates:
    """The newest reports of each rank, and the rates from them."""

    def __init__(self) -> None:
        self.reports: dict[Key, deque[Stats]] = {}
        self.problems: dict[Key, str] = {}  # why a rank's newest report is missing

    def take(self, replies: Mapping[Key, Any], members: Collection[Key]) -> None:
        """Takes the replies of some ranks; forgets ranks that are not `members` any more."""
        self.reports = {key: reports for key, reports in self.reports.items() if key in members}
        self.problems = {key: problem for key, problem in self.problems.items() if key in members}
        for key, reply in replies.items():
            self.problems.pop(key, None)
            try:
                report: Stats = convert(Stats, reply)
            except MessageError:
                error = reply.get("error") if isinstance(reply, dict) else None
                self.problems[key] = str(error or "its statistics cannot be read")
                continue
            reports = self.reports.setdefault(key, deque(maxlen=WINDOW_REPORTS))
            if reports and (report.started != reports[-1].started or report.at <= reports[-1].at):
                reports.clear()  # its counters restarted
            reports.append(report)

    def newest(self, key: Key) -> Stats | None:
        """A rank's newest report."""
        reports = self.reports.get(key)
        return reports[-1] if reports else None

    def values(self, key: Key) -> dict[str, float]:
        """A rank's newest values by name: gauges and counters."""
        report = self.newest(key)
        return report.values if report else {}

    def per_second(self, key: Key, of: Callable[[Stats], float | None]) -> float | None:
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
        return self.per_second(key, lambda report: sum(method.calls for method in report.methods.values()))

    def queues(self) -> list[QueueUse]:
        """The queues, by name and owner."""
        used = []
        for key, reports in self.reports.items():
            for name, queue in reports[-1].queues.items():
                items = self.per_second(key, partial(_items_put, name))
                used.append(QueueUse(name, name_of(key), queue.depth, queue.size, items=items))
        return sorted(used, key=lambda queue: (queue.name, queue.owner))

    def weights(self) -> list[WeightsUse]:
        """The weights, by name."""
        held = defaultdict[str, list[tuple[float, str, WeightsCounters]]](list)
        for key, reports in self.reports.items():
            for name, weights in reports[-1].weights.items():
                if weights.version is not None:
                    held[name].append((weights.version, name_of(key), weights))
        used = []
        for name, members in sorted(held.items()):
            oldest, oldest_at, _ = min(members, key=lambda member: member[:2])
            one = WeightsUse(
                name,
                members=len(members),
                newest=max(version for version, _, _ in members),
                oldest=oldest,
                oldest_at=oldest_at,
                received=sum(weights.received for _, _, weights in members),
                saved=sum(weights.saved for _, _, weights in members),
            )
            used.append(one)
        return used

    def links(self) -> list[CallRate]:
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
            counts, answered = dict(zip(COUNTS, grown[role, name], strict=False)), grown[role, name][len(COUNTS) :]
            p50, p99 = quantile(0.5, answered), quantile(0.99, answered)
            links.append(CallRate(role, tuple(sorted(roles)), name, **counts, p50=p50, p99=p99))
        return sorted(links, key=lambda link: (-link.calls, link.caller, link.method))


def _items_put(name: str, report: Stats) -> float | None:
    """The items put so far into the queue `name`."""
    queue = report.queues.get(name)
    return queue.items if queue else None


def _grown(name: str, before: Stats, after: Stats) -> list[float]:
    """The growth per second of a method's counters between two reports; zeros if it is unknown."""
    old, new = before.methods.get(name), after.methods[name]
    nothing = [0.0] * len(new.counters)
    if old is None or after.at <= before.at:
        return nothing
    pairs = zip(new.counters, old.counters, strict=True)
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
