"""Directives: their epochs, and the short forms of what they say: names, and ranges of members."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from rolecall.gang.protocol import Directive, Key, Ranges
from rolecall.gang.roster import MemberRecord

MAX_RANGES_IN_TEXT = 8


class Epochs:
    """Numbers directives. An epoch names one directive of a member; a directive keeps the epoch at which it was first
    given. `revision` grows if any member's directive may have changed."""

    def __init__(self) -> None:
        self.newest = 1
        self.revision = 0

    def advance(self) -> None:
        """Any directive may differ from now on."""
        self.newest += 1
        self.revision += 1

    def exceed(self, epoch: int) -> None:
        """Later epochs exceed `epoch`, which may be an earlier coordinator's."""
        self.newest = max(self.newest, epoch)

    def give(self, member: MemberRecord, order: Directive) -> Directive:
        """Gives `order` to `member`, under the old epoch if the order is the old one.

        A directive to stop that was given before `member` may have started a worker proves nothing: it is renewed.
        """
        last = member.directive
        if last is None or last.epoch < member.stop_epoch or last.content != order.content:
            if last is not None and last.epoch == order.epoch:
                self.newest += 1
                order = replace(order, epoch=self.newest)
            last = order
        member.directive, member.revision = last, self.revision
        return last


def name_of_directive(coordinator: str, directive: Directive) -> str:
    """The name of a directive in a beat; `coordinator` is the incarnation that gave it, one an epoch."""
    return f"{coordinator}:{directive.epoch}"


def name_of_list(coordinator: str, generation: int, count: int) -> str:
    """The name in a beat of the list of the `count` members of `generation`, which grows with those that join."""
    return f"{coordinator}:{generation}:{count}"


def pack(keys: Iterable[Key]) -> Ranges:
    """`keys` as ranges, in the same order; `unpack` is its inverse."""
    runs: list[tuple[str, list[tuple[int, int]]]] = []
    for role, ordinal in keys:
        if not runs or runs[-1][0] != role:
            runs.append((role, [(ordinal, ordinal)]))
        elif (last := runs[-1][1][-1])[1] + 1 == ordinal:
            runs[-1][1][-1] = last[0], ordinal
        else:
            runs[-1][1].append((ordinal, ordinal))
    return tuple((role, tuple(pairs)) for role, pairs in runs)


def unpack(ranges: Ranges) -> tuple[Key, ...]:
    """The keys of `ranges`."""
    pairs = ((role, first, last) for role, pairs in ranges for first, last in pairs)
    return tuple((role, ordinal) for role, first, last in pairs for ordinal in range(first, last + 1))


def text_of(keys: Iterable[Key]) -> str:
    """`keys` in words, such as "agent_0, observer_0-2"; of many ranges, the first ones."""
    pairs = ((role, first, last) for role, pairs in pack(keys) for first, last in pairs)
    parts = [f"{role}_{first}" + (f"-{last}" if last > first else "") for role, first, last in pairs]
    more = f" and {len(parts) - MAX_RANGES_IN_TEXT} more" if len(parts) > MAX_RANGES_IN_TEXT else ""
    return ", ".join(parts[:MAX_RANGES_IN_TEXT]) + more
