"""Short forms of messages: names of what the other side has, and ranges of members. Pure logic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rolecall.gang.protocol import Answer, Beat, Directive, Key, Ranges

MAX_RANGES_IN_TEXT = 8


def name_of_directive(coordinator: str, directive: Directive) -> str:
    """The name of a directive in a beat; `coordinator` is the incarnation that gave it, one an epoch."""
    return f"{coordinator}:{directive.epoch}"


def name_of_list(coordinator: str, generation: int, count: int) -> str:
    """The name in a beat of the list of the `count` members of `generation`, which grows with those that join."""
    return f"{coordinator}:{generation}:{count}"


def pack(keys: Iterable[Key]) -> Ranges:
    """`keys` as ranges, in the same order; `unpack` is its inverse."""
    runs: list[tuple[str, list[list[int]]]] = []
    for role, ordinal in keys:
        if not runs or runs[-1][0] != role:
            runs.append((role, [[ordinal, ordinal]]))
        elif (last := runs[-1][1][-1])[1] + 1 == ordinal:
            last[1] = ordinal
        else:
            runs[-1][1].append([ordinal, ordinal])
    return tuple((role, ",".join(map(_range, pairs))) for role, pairs in runs)


def _range(pair: list[int]) -> str:
    first, last = pair
    return str(first) if first == last else f"{first}-{last}"


def unpack(ranges: Ranges) -> tuple[Key, ...]:
    """The keys of `ranges`. Raises ValueError for anything else."""
    keys: list[Key] = []
    for role, ordinals in ranges:
        for part in ordinals.split(","):
            first, _, last = part.partition("-")
            keys += ((role, ordinal) for ordinal in range(int(first), int(last or first) + 1))
    return tuple(keys)


def text_of(keys: Iterable[Key]) -> str:
    """`keys` in words, such as "agent_0, observer_0-2"; of many ranges, the first ones."""
    parts = [f"{role}_{part}" for role, ordinals in pack(keys) for part in ordinals.split(",")]
    more = f" and {len(parts) - MAX_RANGES_IN_TEXT} more" if len(parts) > MAX_RANGES_IN_TEXT else ""
    return ", ".join(parts[:MAX_RANGES_IN_TEXT]) + more


def answer_to(coordinator: str, beat: Beat, directive: Directive, members: Ranges, lost: Ranges) -> Answer:
    """The answer to `beat` with what its member does not have of `directive`, whose lists are `members` and `lost`."""
    if beat.known == name_of_directive(coordinator, directive):
        return Answer()
    known = beat.listed == name_of_list(coordinator, directive.generation, directive.listed)
    listed = not directive.members or known
    return Answer(coordinator, replace(directive, members=(), lost=()), None if listed else members, lost)
