"""Programs in which mypy refuses every line that is marked, and no other."""

from __future__ import annotations

from rolecall import Context, Future, Peer, Settings, remote
from tests.typing.members import Counter


def arguments(context: Context[Settings], peer: Peer) -> None:
    context.call(peer, Counter.add, "1")  # wrong
    context.call(peer, Counter.add)  # wrong
    context.call(peer, Counter.add, 1, 2)  # wrong
    context.call(peer, Counter.add, 1, time=2)  # wrong
    context.call(peer, Counter.add, 1, timeout=2.0)  # wrong: see `options`
    context.call(peer, Counter.later, 1)  # wrong
    context.call(peer, Counter.count, "3")  # wrong
    context.call(peer, Counter.promised)  # wrong
    context.call(0, Counter.add, 1)  # wrong
    context.call(peer, "add", 1)  # wrong
    context.call(peer, Counter.subtract, 1)  # wrong
    context.call_all(Counter.add, "1")  # wrong
    context.call_each(Counter.describe, "cups", 2)  # wrong
    context.call_any(Counter.reset, 1)  # wrong
    context.map(Counter.add, ["1"])  # wrong
    context.map(Counter.add, 1)  # wrong
    context.map(Counter.scored, ["a"])  # wrong
    context.map(Counter.scored, ["a"], {"a": 1.0}, window=2)  # wrong: see `options`
    context.map_unordered(Counter.add, range(3), times="2")  # wrong
    context.first(Counter.add, 1)  # wrong
    context.first(2, Counter.add, "1")  # wrong
    context.options(lost="drop")  # wrong
    context.options(timeout="2")  # wrong


def answers(context: Context[Settings], peer: Peer) -> None:
    text: str = context.call(peer, Counter.add, 1).result()  # wrong
    future: Future[str] = context.call(peer, Counter.promised, 0.5)  # wrong
    number: int = context.call(peer, Counter.add, 1)  # wrong: a future
    context.call(peer, Counter.count, 3).result()  # wrong: a stream
    context.call_any(Counter.later, "x").result() + 1  # wrong
    for count in context.call_all(Counter.later, "x"):
        count.bit_length()  # wrong
    for answer in context.call_each(Counter.add, 1):
        answer + 1  # wrong: a pair
    for who, value in context.call_each(Counter.add, 1):
        who.name + str(value)
        value.upper()  # wrong
    for score in context.map(Counter.scored, ["a"], {"a": 1.0}):
        score.upper()  # wrong
    for item, score in context.map_unordered(Counter.add, [1]):
        item.upper()  # wrong
        score.upper()  # wrong
    context.first(2, Counter.later, "x").result()  # wrong: a list
    print(text, future, number)


class Marked:
    @remote(turns=True)  # wrong
    def one(self) -> None: ...

    @remote(serial=1.5)  # wrong
    def three(self) -> None: ...

    @remote(turn="yes")  # wrong
    def two(self) -> None: ...
