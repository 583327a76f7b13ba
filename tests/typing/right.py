"""Programs that mypy accepts: it knows the arguments and the answer of each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

from rolecall import Context, Future, Peer, Settings
from tests.typing.members import Counter


async def to_one(context: Context[Settings], peer: Peer) -> None:
    assert_type(context.call(peer, Counter.add, 1), Future[int])
    assert_type(context.call("counter_0", Counter.add, number=1, times=2).result(), int)
    assert_type(context.call(context.rank0, Counter.describe, "cups", unit="l").result(2.5), dict[str, float])
    assert_type(context.call(peer, Counter.reset), Future[None])
    assert_type(context.call(peer, Counter.later, "x"), Future[str])
    assert_type(context.call(peer, Counter.promised, 0.5), Future[float])
    assert_type(await context.call(peer, Counter.add, 1), int)
    with context.call(peer, Counter.count, 3) as numbers:
        assert_type(next(numbers), int)
        assert_type(list(numbers), list[int])


def to_a_role(context: Context[Settings]) -> None:
    calls = context.options(timeout=2.0, lost="answer", role="counter")
    assert_type(calls.call_all(Counter.add, 1, times=2), Iterator[int])
    assert_type(dict(calls.call_each(Counter.describe, "cups")), dict[Peer, dict[str, float]])
    assert_type(list(calls.call_all(Counter.later, "x")), list[str])
    assert_type(list(calls.call_each(Counter.promised, 0.5)), list[tuple[Peer, float]])
    assert_type(calls.call_any(Counter.add, 1), Future[int])
    assert_type(calls.call_any(Counter.later, "x"), Future[str])
    assert_type(calls.call_any(Counter.promised, share=0.5).result(), float)


def over_a_role(context: Context[Settings]) -> None:
    calls = context.options(to=context.peers("counter")[2:5], window=2, lost="skip")
    assert_type(calls.map(Counter.add, range(10), times=2), Iterator[int])
    assert_type(list(context.map(Counter.scored, ["a", "b"], {"a": 1.0}, scale=2.0)), list[float])
    assert_type(dict(calls.map_unordered(Counter.scored, iter("ab"), {"a": 1.0})), dict[str, float])
    assert_type(list(calls.map(Counter.promised, [0.5])), list[float])
    assert_type(context.first(2, Counter.add, 1), list[int])
    assert_type(calls.first(2, Counter.later, "x"), list[str])


def waits(context: Context[Settings], peer: Peer) -> list[int]:
    def report(answer: object) -> None:
        print(answer)

    future = context.call(peer, Counter.add, 1)
    future.add_done_callback(report)
    return context.wait_all([future])
