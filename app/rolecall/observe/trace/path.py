"""The critical path through a generation's steps: what the end of each had to wait for, back to its beginning.

From the end of the last step, the walk goes back in time through what rank 0 did. Where a rank waited for a call, it
goes on at the rank that handled it; at a handler's beginning, at its caller. Each moment is counted once, at the rank
that all others waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rolecall.observe.trace.timeline import Call, Segment, Timeline

Share = tuple[str, str]  # a rank, or two and a direction, and what it did


class Path:
    """The walk from `end` back to `start`, in ns of the reference's clock, beginning at the rank `name`. `shares` adds
    up to the time between.
    """

    def __init__(self, timelines: Mapping[str, Timeline], name: str, start: int, end: int) -> None:
        self.shares = defaultdict[Share, int](int)
        self._timelines, self._name, self._start, self._at = timelines, name, start, end
        self._through: Call | None = None  # the call by which the walk has come to this rank
        visited = set[str]()  # ranks that it has gone to without using time
        while self._at > start:
            before, visited = self._at, visited | {self._name}
            self._back()
            if self._at < before:
                visited = set()
            elif self._name in visited:  # what led here was not recorded, or clocks contradict each other
                segment = self._segment()
                since = max(segment.start if segment else start, self._through.came if self._through else start)
                self._spend(since, self._name, self._held() or "other")

    def _segment(self) -> Segment | None:
        timeline = self._timelines.get(self._name)
        return timeline.before(self._at) if timeline else None

    def _back(self) -> None:
        segment, through = self._segment(), self._through
        if through and self._at <= through.came:
            self._through = None
            self._travel(through.start, through)
            self._go(through.caller)
        elif segment is None:
            self._spend(self._start, self._name, "other")
        elif segment.end < self._at:
            self._spend(segment.end, self._name, "other")
        elif segment.what == "waiting" and segment.call:
            self._back_through_wait(segment, segment.call)
        elif segment.what == "handling" and segment.call:
            call = segment.call
            self._spend(segment.start, self._name, f"handling {call.method}")
            if segment.start <= call.came and self._at > self._start:
                self._through = None
                self._travel(call.start, call)
                self._go(call.caller)
        else:
            what = self._held() if segment.what in ("idle", "computing") else ""
            what = what or segment.what + (f", {segment.name}" if segment.name else "")
            self._spend(max(segment.start, through.came if through else 0), self._name, what)

    def _held(self) -> str:
        """What a rank does that others wait for while no handler runs: an asynchronous one has yet to answer."""
        through = self._through
        return f"{through.method}, answer to come" if through and through.ran < self._at <= through.left else ""

    def _back_through_wait(self, segment: Segment, call: Call) -> None:
        if call.called not in self._timelines:
            self._spend(segment.start, self._name, f"waiting for {call.to}, {call.method}")
        elif self._at > call.left:
            self._travel(max(call.left, segment.start), call)
            if self._at == call.left:
                self._go(call.called, call)
        elif self._at > call.came:
            self._go(call.called, call)
        else:
            self._travel(max(call.start, segment.start), call)

    def _go(self, name: str, through: Call | None = None) -> None:
        self._name, self._through = name, through

    def _spend(self, to: int, name: str, what: str) -> None:
        to = min(max(to, self._start), self._at)
        if to < self._at:
            self.shares[name, what] += self._at - to
        self._at = to

    def _travel(self, to: int, call: Call) -> None:
        """Goes back through time that a call spent outside its handler."""
        after, to = self._at, min(max(to, self._start), self._at)
        queueing = round((after - to) * (1 - min(1.0, call.network / call.outside))) if call.outside else 0
        route = f"{call.caller} > {call.called}"
        self._spend(to + queueing, route, f"network, {call.method}")
        self._spend(to, route, f"queueing, {call.method}")
