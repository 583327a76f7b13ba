"""Where the time of a job's steps went: for each rank, for whom it waited, and along the critical path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.path import Path, Share
from rolecall.observe.trace.timeline import Call, Reader, Segment, What

KINDS: tuple[What, ...] = get_args(What)
MOST_SHARES = 12  # of the critical path that the table lists
WORTH = 0.05  # of the time of the steps: a wait that a sentence names
SENTENCES = 6


@dataclass
class Wait:
    """How long a rank waited for another, in ns, and what for. `held` is the time in which an asynchronous handler had
    returned and its answer was still to come. `unknown` is what calls took whose other side was not recorded."""

    network: float = 0.0
    queueing: float = 0.0
    handler: float = 0.0
    held: float = 0.0
    unknown: float = 0.0
    methods: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        """All of it."""
        return self.network + self.queueing + self.handler + self.held + self.unknown

    def add(self, segment: Segment, call: Call) -> None:
        """Counts a time in which the rank waited for `call`."""
        self.methods[call.method] += segment.end - segment.start
        if not call.called:
            self.unknown += segment.end - segment.start
            return
        outside = _overlap(segment, call.start, call.came) + _overlap(segment, call.left, call.end)
        network = outside * min(1.0, call.network / call.outside) if call.outside else 0.0
        handler, held = _overlap(segment, call.came, call.ran), _overlap(segment, call.ran, call.left)
        self.network += network
        self.handler += handler
        self.held += held
        self.queueing += segment.end - segment.start - network - handler - held  # until the thread goes on, too


PARTS = {"network": "network", "queueing": "queueing", "handler": "its handler", "held": "an answer to come",
         "unknown": "not recorded"}  # fmt: skip


@dataclass
class Rank:
    """What a rank did in the time of the steps, in ns, and for whom it waited."""

    name: str
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, Wait] = field(default_factory=lambda: defaultdict(Wait))

    @property
    def total(self) -> float:
        """The time that it was recorded for."""
        return sum(self.spent.values())


class Summary:
    """The summary of a trace. `seconds` is the time from the first step's beginning to the last step's end, of all
    generations; where no steps were recorded, all the time there is."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.job = calls, calls.trace.job
        self.ranks: dict[str, Rank] = {}
        self.shares = defaultdict[Share, int](int)
        self.steps = self.generations = self.nanoseconds = 0
        for _, group in groupby(calls.trace.recordings, lambda one: one.process.generation):
            self._add(Reader(calls, group))

    def _add(self, reader: Reader) -> None:
        timelines = {name: timeline for name, timeline in reader.timelines.items() if timeline.segments}
        if not timelines:
            return
        if reader.steps:
            starts, ends = zip(*reader.steps.values(), strict=True)
            start, end = min(starts), max(ends)
        else:
            start = min(timeline.segments[0].start for timeline in timelines.values())
            end = max(timeline.segments[-1].end for timeline in timelines.values())
        self.steps += max(reader.steps) - min(reader.steps) + 1 if reader.steps else 0  # a span may be of several
        self.generations += 1
        self.nanoseconds += end - start
        for name, timeline in timelines.items():
            rank = self.ranks.setdefault(name, Rank(name))
            for segment in timeline.within(start, end):
                rank.spent[segment.what] += segment.end - segment.start
                if segment.what == "waiting" and segment.call:
                    rank.waits[segment.call.called or segment.call.to].add(segment, segment.call)
        first = min(timelines.values(), key=lambda timeline: timeline.process.rank).process.name
        for share, time in Path(timelines, first, start, end).shares.items():
            self.shares[share] += time

    @property
    def seconds(self) -> float:
        """The time that all shares are of."""
        return self.nanoseconds / 1e9

    def path(self) -> list[tuple[Share, float]]:
        """The critical path: who did what, for which share of the time; the greatest first."""
        shares = ((share, time / max(1, self.nanoseconds)) for share, time in self.shares.items())
        return sorted(shares, key=lambda one: -one[1])

    def sentences(self) -> list[str]:
        """What stands out, such as `trainer 1 waits 41 % of the time for ps 0 (exchange), of that 30 % queueing`."""
        waits = sorted(
            ((wait.total / self.nanoseconds, rank.name, to, wait)
             for rank in self.ranks.values() for to, wait in rank.waits.items()), key=lambda one: -one[0]
        )  # fmt: skip
        return [_sentence(*one) for one in waits[:SENTENCES] if one[0] >= WORTH]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON. Shares are of the time, times in milliseconds a step where there are steps."""
        return {
            "job": self.job,
            "seconds": self.seconds,
            "steps": self.steps,
            "generations": self.generations,
            "ranks": {rank.name: self._rank(rank) for rank in self.ranks.values()},
            "critical_path": [{"rank": rank, "what": what, "share": share} for (rank, what), share in self.path()],
            "network_ms": [
                {"method": method, "from": caller, "to": called, "bytes_below": 2**bits, "fastest_ms": time / 1e6}
                for (method, caller, called, bits), time in sorted(self.calls.fastest.items())
            ],
            "sentences": self.sentences(),
            "clocks": [
                {"rank": one.process.name, "generation": one.process.generation, "method": one.method,
                 "error_ms": None if one.error_ns is None else one.error_ns / 1e6}
                for one in self.calls.clocks.alignments()
            ],
            "problems": self.calls.trace.damage(),
        }  # fmt: skip

    def _rank(self, rank: Rank) -> dict[str, Any]:
        return {
            "share": {what: rank.spent[what] / self.nanoseconds for what in KINDS},
            "waits": {
                to: {"share": wait.total / self.nanoseconds, "methods": sorted(wait.methods)}
                | {part: getattr(wait, part) / wait.total if wait.total else 0.0 for part in PARTS}
                for to, wait in rank.waits.items()
            },
        }

    # ---- for a terminal

    def render(self) -> RenderableType:
        """The tables."""
        if not self.nanoseconds:
            return Text(f"{self.job}: no span was recorded")
        each = f", {self.nanoseconds / self.steps / 1e6:,.1f} ms each" if self.steps else ""
        head = f"{self.job}: {self.steps:,} steps in {self.seconds:,.2f} s{each}"
        head += f", {self.generations} generations" if self.generations > 1 else ""
        parts: list[RenderableType] = [Text(head, style="bold"), self._ranks()]
        if any(rank.waits for rank in self.ranks.values()):
            parts += [Text("\nwho waits for whom, and what that goes to", style="bold"), self._waits()]
        parts += [Text("\nthe critical path", style="bold"), self._path()]
        sentences = "\n".join(self.sentences())
        parts += [Text("\n" + sentences)] if sentences else []
        clocks = sorted({str(one) for one in self.calls.clocks.alignments() if one.method not in ("reference",)})
        parts += [Text("\nclocks\n" + "\n".join(clocks), style="dim")] if clocks else []
        return Group(*parts)

    def _ranks(self) -> Table:
        shown = [what for what in KINDS if any(rank.spent[what] for rank in self.ranks.values())]
        absent = any(self._absent(rank) for rank in self.ranks.values())
        table = _table("rank", *shown, *(["not recorded"] if absent else []))
        for rank in self.ranks.values():
            cells = [_percent(rank.spent[what] / self.nanoseconds) for what in shown]
            table.add_row(rank.name, *cells, *([_percent(self._absent(rank))] if absent else []))
        return table

    def _absent(self, rank: Rank) -> float:
        share = 1 - rank.total / self.nanoseconds
        return share if share > 0.001 else 0.0

    def _waits(self) -> Table:
        shown = [part for part in PARTS if any(getattr(wait, part) for rank in self.ranks.values()
                                               for wait in rank.waits.values())]  # fmt: skip
        table = _table("rank", "waits for", "share", *(PARTS[part] for part in shown), "methods")
        for rank in self.ranks.values():
            for to, wait in sorted(rank.waits.items(), key=lambda one: -one[1].total):
                cells = [_percent(getattr(wait, part) / wait.total if wait.total else 0.0) for part in shown]
                table.add_row(rank.name, to, _percent(wait.total / self.nanoseconds), *cells, _methods(wait))
        return table

    def _path(self) -> Table:
        table, path = _table("share", "rank", "what"), self.path()
        for (rank, what), share in path[:MOST_SHARES]:
            table.add_row(_percent(share), rank, what)
        if rest := sum(share for _, share in path[MOST_SHARES:]):
            table.add_row(_percent(rest), "", f"{len(path) - MOST_SHARES} more")
        return table


def _sentence(share: float, rank: str, to: str, wait: Wait) -> str:
    part = max(PARTS, key=lambda part: getattr(wait, part))
    parts = [part] if part == "queueing" else [part, "queueing"]
    shares = [(getattr(wait, part) / wait.total, PARTS[part]) for part in parts]
    of_that = ", ".join(f"{one:.0%} {name}".replace("%", " %") for one, name in shares if one >= 0.005)
    return f"{rank} waits {share * 100:.0f} % of the time for {to} ({_methods(wait)}), of that {of_that}"


def _methods(wait: Wait) -> str:
    return ", ".join(sorted(wait.methods, key=lambda method: -wait.methods[method])[:3])


def _overlap(segment: Segment, start: int, end: int) -> int:
    return max(0, min(segment.end, end) - max(segment.start, start))


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share else "-"


def _table(*head: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("rank", "waits for", "methods", "what") else "right")
    return table
