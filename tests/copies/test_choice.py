"""Who holds copies, and which checkpoint a run goes on from."""

from __future__ import annotations

import pytest

from rolecall.copies import choice
from rolecall.copies.choice import Claim, Source, Stem

OLD, NEW, LATER = (1, 90), (2, 10), (2, 20)


@pytest.mark.parametrize(
    ("mine", "claims", "expected"),
    [
        (None, {}, None),
        (OLD, {"a": Claim("x", (OLD,))}, None),
        (LATER, {"a": Claim("x", (NEW,), NEW, ("a",))}, None),
        (None, {"a": Claim("x", (OLD,)), "b": Claim("y", (NEW, OLD))}, Source(NEW, ("b",))),
        (OLD, {"a": Claim("x", (NEW,), NEW, ("a",)), "b": Claim("y", (NEW,))}, Source(NEW, ("a", "b"))),
        # one that is not there holds the newest, as the others remember
        (OLD, {"a": Claim("x", (NEW,), LATER, ("b", "c")), "c": Claim("y")}, Source(LATER, (), ("b", "c"))),
        (None, {"a": Claim("x", (LATER,), LATER, ("a", "b"))}, Source(LATER, ("a",), ("b",))),
    ],
)
def test_nothing_but_the_newest_is_a_source(
    mine: Stem | None, claims: dict[str, Claim], expected: Source | None
) -> None:
    assert choice.source(mine, claims) == expected


@pytest.mark.parametrize(
    ("machines", "count", "before", "expected"),
    [
        ({}, 1, [], []),
        ({"a": "here", "b": "x", "c": "y"}, 1, [], ["b"]),
        ({"a": "here", "b": "x", "c": "y"}, 3, [], ["b", "c", "a"]),
        ({"b": "x", "c": "x", "d": "y"}, 2, [], ["b", "d"]),  # not both on one machine
        ({"b": "x", "c": "y"}, 1, ["c"], ["c"]),  # it lacks less
        ({"a": "here", "b": "x"}, 1, ["a"], ["b"]),
        ({"a": "here"}, 2, [], ["a"]),  # better than nothing
    ],
)
def test_copies_are_held_by_other_machines_where_there_are_some(
    machines: dict[str, str], count: int, before: list[str], expected: list[str]
) -> None:
    assert choice.holders(machines, "here", count, before) == expected
