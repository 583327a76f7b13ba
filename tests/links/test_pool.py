"""The rules of a map as scripts, `pool/*.txt`, in the form of those of links, and a map of a thousand items in virtual
time, over members that die and join.

    pool items=5 window=2 unordered again lost=skip prepares
    see a b          the members that are there; with them, and after each command, come the calls that are made
    prepared a       it has the arguments that all items share
    answer 3         the member that was called with the item 3 has answered
    lose 3           it is lost
    take 2           two answers are asked for
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.errors import PeerLostError
from rolecall.links.pool import AHEAD, Pool, Task

SCRIPTS = sorted((Path(__file__).parent / "pool").glob("*.txt"))


def call_members(pool: Pool, items: Iterator[int]) -> list[Task]:
    """What a driver does after each event: reads items, and calls members. Returns the calls."""
    calls = []
    while True:
        while task := pool.next_call():
            calls.append(task)
        if not pool.wants:
            return calls
        item = next(items, None)
        if item is None:
            pool.exhausted()
        else:
            pool.read(item)


class World:
    """A map, driven by a script."""

    def __init__(self) -> None:
        self.items: Iterator[int] = iter(())
        self.pool = Pool(1, ordered=True, again=True, on_loss="raise")

    def run(self, line: str) -> list[str]:
        """Carries out a command. Returns what it prints."""
        command, *words = line.split()
        printed: list[str] = getattr(self, f"_{command}")(*words) or []
        printed += [f"call {task.member} {task.number}" for task in call_members(self.pool, self.items)]
        return printed + ["nobody is there"] * self.pool.nobody + ["over"] * self.pool.over

    def _pool(self, *words: str) -> None:
        given: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
        self.items = iter(range(int(given["items"])))
        self.pool = Pool(
            int(given.get("window", 1)),
            ordered="unordered" not in words,
            again="again" in words,
            on_loss=given.get("lost", "raise"),
            prepares="prepares" in words,
        )

    def _see(self, *members: str) -> list[str]:
        return [f"prepare {member}" for member in self.pool.see(members)]

    def _prepared(self, member: str) -> None:
        self.pool.prepared(member)

    def _answer(self, number: str) -> None:
        self.pool.answered(int(number), f"answer {number}")

    def _lose(self, number: str) -> list[str]:
        try:
            self.pool.lost(int(number), PeerLostError("it does not answer"))
        except PeerLostError as error:
            return [f"raise {error}"]
        return []

    def _take(self, count: str) -> list[str]:
        taken = [self.pool.take() for _ in range(int(count))]
        return [f"give out {each.item}: {each.answer}" if each else "nothing yet" for each in taken]


def play(text: str) -> str:
    """The script with the output of its commands."""
    world, blocks = World(), []
    for block in text.strip().split("\n\n"):
        commands = block.partition("----")[0].strip()
        printed = [line for command in commands.splitlines() for line in world.run(command)]
        blocks.append("\n".join([commands, "----", *printed]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, request: pytest.FixtureRequest) -> None:
    printed = play(path.read_text())
    if request.config.getoption("--rewrite", default=False):
        path.write_text(printed)
    assert printed == path.read_text()


def test_scripts_are_there() -> None:
    assert len(SCRIPTS) > 7


@settings(max_examples=20, deadline=None)
@given(st.integers(), st.booleans(), st.integers(1, 3))
def test_a_thousand_items_over_members_that_die_and_join_are_answered_once(
    seed: int, ordered: bool, window: int
) -> None:
    """In virtual time: each call takes 2 s, and 2 to 8 members die and join at random, about every 5 s."""
    chance, items = random.Random(seed), iter(range(1000))
    pool = Pool(window, ordered=ordered, again=True, on_loss="raise")
    members, joined, now, given_out = ["0", "1"], 2, 0.0, list[Any]()
    events: list[tuple[float, int, Any]] = [(5.0, -1, None)]  # the end of a call, or a member that dies or joins
    longest = 0
    while True:
        pool.see(members)
        for task in call_members(pool, items):
            heapq.heappush(events, (now + 2, task.number, task.member))
        calls = [member for _, _, member in events if member]
        assert max(map(calls.count, calls), default=0) <= window
        while answered := pool.take():
            given_out.append(answered.item)
        longest = max(longest, len(pool._tasks))
        if pool.over:
            break
        now, number, member = heapq.heappop(events)
        if member in members:
            pool.answered(number, number)
        elif member:
            pool.lost(number, PeerLostError(member))
        else:
            heapq.heappush(events, (now + chance.uniform(0, 10), -1, None))
            if len(members) == 8 or (len(members) > 2 and chance.random() < 0.5):
                members.remove(chance.choice(members))
            else:
                members.append(str(joined))
                joined += 1
    assert (given_out if ordered else sorted(given_out)) == list(range(1000))
    assert longest <= AHEAD * window * 8
    assert now < 2 * 1000 / (2 * window) * 1.5  # two members at least work all the time
