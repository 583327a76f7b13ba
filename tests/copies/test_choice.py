"""Who holds copies, and which checkpoint a run goes on from."""

from __future__ import annotations

import pytest

from rolecall.copies import choice
from rolecall.copies.choice import Claim, Known, Return, Source, Stem

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


def test_no_older_checkpoint_comes_back_while_the_newest_is_waited_for() -> None:
    """Also if the member that remembered it has gone meanwhile."""
    claims = {"b": Claim("y", (), NEW, ("a",))}
    back = Return(Source(NEW, (), ("a",)), claims, end=10.0)
    assert (back.next(), back.awaited(9.0)) == (None, ["a"])
    back.look({"c": Claim("z", (OLD,), OLD, ("c",))})
    assert (back.next(), back.awaited(9.0)) == (None, ["a"])
    back.look({"a": Claim("x", (NEW,), NEW, ("a",))})
    assert (back.checkpoint, back.next()) == (NEW, "a")
    back.look({"d": Claim("v", (LATER,))})
    assert (back.checkpoint, back.next()) == (LATER, "d")


def test_a_holder_that_is_lost_is_waited_for_and_one_with_a_torn_copy_is_not() -> None:
    claims = {"a": Claim("x", (NEW,)), "b": Claim("y", (NEW,))}
    back = Return(Source(NEW, ("a", "b")), claims, end=10.0)
    back.failed("a", "was lost", lost=True)
    back.failed("b", "is torn", lost=False)
    assert (back.next(), back.awaited(9.0)) == (None, ["a"])
    back.look(claims)
    assert back.next() == "a"
    back.failed("a", "was lost", lost=True)
    assert back.awaited(10.0) == []
    assert back.problem == "the copy at b cannot be used: is torn"


def test_a_disk_remembers_the_newest() -> None:
    known = Known().noted(Known(2, NEW, ("a",))).begun(3)
    assert known == Known(3, NEW, ("a",))
    assert known.begun(1).noted(Known(2, LATER, ("b",))) == known
    assert known.noted(Known(3, LATER, ("b",))) == Known(3, LATER, ("b",))
    assert (known.newest([OLD]), known.newest([(4, 0)])) == (3, 4)
