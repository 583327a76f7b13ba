"""Which trace each span belongs to, while spans of all ranks come in any order: that of its topmost ancestor.

A trace is a step with all it calls, or whatever else has no parent. A span ends before its parent does, and is held
until that has come, or until the wait gets too long: then the parent's number stands for the trace, which the parent
joins once it comes.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rolecall.record.records import Process, Span

HOLD = 10.0  # seconds that a span waits for its parent
MOST_KNOWN = 200_000  # spans whose trace is remembered
MOST_HELD = 50_000
TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}.*")  # by the W3C


@dataclass(frozen=True, slots=True)
class Placed:
    """A span with its trace and its parent there, as numbers; the parent is 0 for none."""

    process: Process
    span: Span
    trace: int
    parent: int


@dataclass(slots=True)
class _Held:
    process: Process
    span: Span
    since: float


class Lineage:
    """Finds the traces of spans. Seconds are passed in."""

    def __init__(self) -> None:
        self._traces = OrderedDict[str, int]()  # of spans, by number
        self._held = OrderedDict[str, _Held]()  # spans without a trace, the oldest first
        self._children: dict[str, list[str]] = {}  # numbers of held spans, by their parents'

    def add(self, process: Process, span: Span, now: float) -> Iterator[Placed]:
        """Takes a span; yields those whose traces are known now."""
        carried = TRACEPARENT.fullmatch(str(span.attributes.get("traceparent", "")))
        if carried:  # of the program's OpenTelemetry: the call belongs to that trace
            yield Placed(process, span, int(carried["trace"], 16), int(carried["span"], 16))
            yield from self._known(span.id, int(carried["trace"], 16))
        elif (trace := self._traces.get(span.id, self._traces.get(span.parent))) is not None or not span.parent:
            trace = _trace(span.id) if trace is None else trace
            yield Placed(process, span, trace, number(span.parent))
            yield from self._known(span.id, trace)
        else:
            self._held[span.id] = _Held(process, span, now)
            self._children.setdefault(span.parent, []).append(span.id)
            if len(self._held) > MOST_HELD:
                yield from self._release(next(iter(self._held)))

    def expire(self, now: float) -> Iterator[Placed]:
        """Yields the spans that have been held for too long; with an infinite `now`, all."""
        while self._held:
            id, held = next(iter(self._held.items()))
            if now - held.since < HOLD:
                return
            yield from self._release(id)

    def _release(self, id: str) -> Iterator[Placed]:
        """Gives up waiting for the topmost ancestor of a held span that has come."""
        seen = {id}
        while (parent := self._held[id].span.parent) in self._held and parent not in seen:
            id = parent
            seen.add(id)
        above = self._held[id].span.parent
        yield from self._known(above, _trace(above))

    def _known(self, id: str, trace: int) -> Iterator[Placed]:
        """The span `id` belongs to `trace`, and so do those that waited for it."""
        ahead = [id]
        while ahead:
            id = ahead.pop()
            self._traces[id] = trace
            for child in self._children.pop(id, ()):
                if held := self._held.pop(child, None):
                    yield Placed(held.process, held.span, trace, number(held.span.parent))
                    ahead.append(child)
        while len(self._traces) > MOST_KNOWN:
            self._traces.popitem(last=False)


def _trace(id: str) -> int:
    """A trace's number, not 0: 128 bits of the number of the span that it begins with."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=16).digest()) or 1


def number(id: str) -> int:
    """A span's number; 0 for none."""
    try:
        return int(id, 16)
    except ValueError:  # none, or damaged
        return 0
