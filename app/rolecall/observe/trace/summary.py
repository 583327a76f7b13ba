"""The time of a job's steps in tables: what each rank did, and for whom it waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.timeline import Call, Reader, Segment, What, within

KINDS: tuple[What, ...] = get_args(What)


@dataclass
class Wait:
    """The time, in ns, that a rank waited for another. `held` is the time between the return of an asynchronous handler
    and its answer; `unknown` that of calls whose other side was not recorded."""

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
        """Adds a segment in which the rank waited for `call`."""
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
        self.queueing += (
            segment.end - segment.start - network - handler - held
        )  # includes the time until the thread continues


PARTS = {"network": "network", "queueing": "queueing", "handler": "its handler", "held": "an answer to come",
         "unknown": "not recorded"}  # fmt: skip


@dataclass
class Rank:
    """The time of the steps at a rank, in ns, by activity; and its waits, by rank."""

    name: str
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, Wait] = field(default_factory=lambda: defaultdict(Wait))

    @property
    def total(self) -> float:
        """The time in which it was recorded."""
        return sum(self.spent.values())


class Summary:
    """The summary of a trace. `seconds` is the time from the first step's beginning to the last step's end, of all
    generations; if no steps were recorded, all the time there is."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.job = calls, calls.trace.job
        self.ranks: dict[str, Rank] = {}
        self.steps = self.generations = self.nanoseconds = 0
        for _, group in groupby(calls.trace.recordings, lambda one: one.process.generation):
            self._add(Reader(calls, group))

    def _add(self, reader: Reader) -> None:
        timelines = {name: segments for name, segments in reader.timelines.items() if segments}
        if not timelines:
            return
        if reader.steps:
            starts, ends = zip(*reader.steps.values(), strict=True)
            start, end = min(starts), max(ends)
        else:
            start = min(timeline[0].start for timeline in timelines.values())
            end = max(timeline[-1].end for timeline in timelines.values())
        self.steps += max(reader.steps) - min(reader.steps) + 1 if reader.steps else 0  # a span may be of several
        self.generations += 1
        self.nanoseconds += end - start
        for name, timeline in timelines.items():
            rank = self.ranks.setdefault(name, Rank(name))
            for segment in within(timeline, start, end):
                rank.spent[segment.what] += segment.end - segment.start
                if segment.what == "waiting" and segment.call:
                    rank.waits[segment.call.called or segment.call.to].add(segment, segment.call)

    @property
    def seconds(self) -> float:
        """The time that all shares are of."""
        return self.nanoseconds / 1e9

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON. Shares are of the time, times in milliseconds."""
        return {
            "job": self.job,
            "seconds": self.seconds,
            "steps": self.steps,
            "generations": self.generations,
            "ranks": {rank.name: self._rank(rank) for rank in self.ranks.values()},
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


def _methods(wait: Wait) -> str:
    return ", ".join(sorted(wait.methods, key=lambda method: -wait.methods[method])[:3])


def _overlap(segment: Segment, start: int, end: int) -> int:
    return max(0, min(segment.end, end) - max(segment.start, start))


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share else "-"


def _table(*head: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name in ("rank", "waits for", "methods") else "right")
    return table
