"""Programs in which mypy refuses every line that is marked, and no other."""

from __future__ import annotations

from rolecall import Context, Peer, Settings, remote
from rolecall.wire.future import Future
from tests.typing.members import Counter


def arguments(context: Context[Settings], peer: Peer) -> None:
    calls = context.calls
    calls.call(peer, Counter.add, "1")  # wrong
    calls.call(peer, Counter.add)  # wrong
    calls.call(peer, Counter.add, 1, 2)  # wrong
    calls.call(peer, Counter.add, 1, time=2)  # wrong
    calls.call(peer, Counter.add, 1, timeout=2.0)  # wrong: see `options`
    calls.call(peer, Counter.later, 1)  # wrong
    calls.call(peer, Counter.count, "3")  # wrong
    calls.call(peer, Counter.promised)  # wrong
    calls.call(0, Counter.add, 1)  # wrong
    calls.call(peer, "add", 1)  # wrong
    calls.call(peer, Counter.subtract, 1)  # wrong
    calls.call_all(Counter.add, "1")  # wrong
    calls.call_each(Counter.describe, "cups", 2)  # wrong
    calls.call_any(Counter.reset, 1)  # wrong
    calls.options(lost="drop")  # wrong
    calls.options(timeout="2")  # wrong


def answers(context: Context[Settings], peer: Peer) -> None:
    calls = context.calls
    text: str = calls.call(peer, Counter.add, 1).result()  # wrong
    future: Future[str] = calls.call(peer, Counter.promised, 0.5)  # wrong
    number: int = calls.call(peer, Counter.add, 1)  # wrong: a future
    calls.call(peer, Counter.count, 3).result()  # wrong: a stream
    calls.call_any(Counter.later, "x").result() + 1  # wrong
    for count in calls.call_all(Counter.later, "x"):
        count.bit_length()  # wrong
    for answer in calls.call_each(Counter.add, 1):
        answer + 1  # wrong: a pair
    for who, value in calls.call_each(Counter.add, 1):
        who.name + str(value)
        value.upper()  # wrong
    print(text, future, number)


class Marked:
    @remote(turns=True)  # wrong
    def one(self) -> None: ...

    @remote(turn="yes")  # wrong
    def two(self) -> None: ...
