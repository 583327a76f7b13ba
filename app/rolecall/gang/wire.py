"""What travels of orders and reports: names for what the other side has, and ranges for long lists. Pure logic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rolecall.gang.protocol import Answer, Beat, Directive, Key, Ranges

SHOWN = 8  # ranges of members that a text names


def name_of_directive(lead: str, directive: Directive) -> str:
    """What a beat calls a directive from the coordinator of incarnation `lead`, which gives a member one an epoch."""
    return f"{lead}:{directive.epoch}"


def name_of_list(lead: str, generation: int) -> str:
    """What a beat calls the list of the members of `generation`, from the coordinator of incarnation `lead`."""
    return f"{lead}:{generation}"


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
    """The keys of `ranges`. Raises ValueError where they are not ranges."""
    keys: list[Key] = []
    for role, ordinals in ranges:
        for part in ordinals.split(","):
            first, _, last = part.partition("-")
            keys += ((role, ordinal) for ordinal in range(int(first), int(last or first) + 1))
    return tuple(keys)


def text_of(keys: Iterable[Key]) -> str:
    """`keys` in words: "agent 0, observer 0-2"; of many ranges, the first ones."""
    parts = [f"{role} {part}" for role, ordinals in pack(keys) for part in ordinals.split(",")]
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return ", ".join(parts[:SHOWN]) + more


def answer_to(lead: str, beat: Beat, directive: Directive, members: Ranges, lost: Ranges) -> Answer:
    """The answer to `beat` with `directive`: what its member does not have. `members`, `lost`: the directive's."""
    if beat.known == name_of_directive(lead, directive):
        return Answer()
    listed = not directive.members or beat.listed == name_of_list(lead, directive.generation)
    return Answer(lead, replace(directive, members=(), lost=()), None if listed else members, lost)
