"""Which cells are asked of whom, on a network without bytes: sources have an uplink of so many cells a second."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.weights.plan import PATIENCE_SECONDS, Plan


@dataclass(order=True)
class Answer:
    at: float
    number: int
    reader: str = field(compare=False)
    source: str = field(compare=False)
    cell: int = field(compare=False)


class Network:
    """Members without a cell, those in `pulling`, that pull all `cells`; `readers` of them share. A member sends a cell
    in one second of its uplink; those in `dead` answer nothing."""

    def __init__(self, cells: int, holders: list[str], readers: list[str], pulling: list[str] | None = None) -> None:
        self.plans = {name: Plan(name, range(cells), holders, readers) for name in pulling or readers}
        self.direct = {name: set[int]() for name in self.plans}
        self.here = {name: set[int]() for name in self.plans} | {name: set(range(cells)) for name in holders}
        self.sent = Counter[str]()
        self.dead = set[str]()
        self.finished = dict[str, float]()
        self._busy = dict.fromkeys(self.here, 0.0)  # until when a member's uplink is
        self._waiting: list[tuple[str, str, int]] = []
        self._answers: list[Answer] = []
        self._numbers = itertools.count()
        self.now = 0.0

    def run(self) -> None:
        """Until all that can have everything do."""
        for _ in range(5000):
            for name, plan in self.plans.items():
                if name not in self.dead:
                    self._waiting += [(name, *request) for request in plan.next(self.now)]
                    self.direct[name].update(plan.take_direct())
            self._serve()
            if self._answers:
                answer = heapq.heappop(self._answers)
                self.now = answer.at
                if answer.reader not in self.dead:
                    self._take(answer)
            elif any(plan.missing for name, plan in self.plans.items() if name not in self.dead):
                self.now += PATIENCE_SECONDS
                for plan in self.plans.values():
                    plan.look(self.now)
            else:
                return
        raise AssertionError("it does not end")

    def _serve(self) -> None:
        waiting, self._waiting = self._waiting, []
        for reader, source, cell in waiting:
            if source in self.dead:
                continue
            if cell in self.here[source]:
                self._busy[source] = max(self._busy[source], self.now) + 1.0
                self.sent[source] += 1
                heapq.heappush(self._answers, Answer(self._busy[source], next(self._numbers), reader, source, cell))
            elif cell in self.direct[source]:
                self._waiting.append((reader, source, cell))
            else:
                self.plans[reader].refused(source, cell, self.now)

    def _take(self, answer: Answer) -> None:
        plan = self.plans[answer.reader]
        plan.came(answer.source, answer.cell, self.now)
        self.here[answer.reader].add(answer.cell)
        if not plan.missing:
            self.finished.setdefault(answer.reader, self.now)

    def lose(self, name: str) -> None:
        self.dead.add(name)
        for plan in self.plans.values():
            plan.lost(name)


def test_eight_readers_take_little_longer_than_one() -> None:
    readers = [f"reader_{number}" for number in range(8)]
    network = Network(400, ["publisher"], readers)
    network.run()
    assert max(network.finished.values()) < 1.2 * 400
    assert network.sent["publisher"] == 400  # each cell once
    assert max(network.sent[name] for name in readers) <= 400 * 7 / 8 + 1


def test_a_late_reader_asks_all_holders_alike() -> None:
    holders = ["publisher", *(f"reader_{number}" for number in range(7))]
    network = Network(80, holders, holders[1:], pulling=["late"])
    network.run()
    assert set(network.sent.values()) == {10}


def test_a_late_reader_while_the_others_still_share() -> None:
    readers = ["reader_0", "reader_1", "reader_2"]
    network = Network(60, ["publisher"], readers, pulling=[*readers, "late"])
    network.run()
    assert network.sent["publisher"] < 2 * 60  # most of its cells come from the readers
    assert network.here["late"] == set(range(60))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 60),
    st.sets(st.integers(0, 10), max_size=4),
    st.sets(st.integers(0, 10), max_size=4),
)
def test_everything_arrives_while_a_holder_answers(
    readers: int, holders: int, cells: int, silent: set[int], lost: set[int]
) -> None:
    names = [f"reader_{number}" for number in range(readers)]
    members = [*names, *(f"holder_{number}" for number in range(holders - 1))]
    network = Network(cells, ["publisher", *members[readers:]], names)
    network.dead |= {members[number % len(members)] for number in silent}
    for number in lost:
        network.lose(members[number % len(members)])
    network.run()
    for name in names:
        assert name in network.dead or network.here[name] == set(range(cells))


def test_without_holders_it_is_hopeless() -> None:
    plan = Plan("reader_0", range(3), ["publisher"], ["reader_0"])
    assert [request.source for request in plan.next(0.0)] == ["publisher"] * 3
    plan.came("publisher", 0, 1.0)
    assert not plan.hopeless
    plan.lost("publisher")
    assert plan.hopeless
    assert Plan("reader_0", range(3), [], []).hopeless
    assert not Plan("reader_0", [], [], []).hopeless


def test_a_silent_source_is_asked_again_only_elsewhere() -> None:
    plan = Plan("reader_0", range(4), ["publisher"], ["reader_0", "reader_1"])
    asked = {request.cell: request.source for request in plan.next(0.0)}
    assert asked == {0: "publisher", 2: "publisher", 1: "reader_1", 3: "reader_1"}
    plan.came("publisher", 0, 0.5)
    plan.came("publisher", 2, 0.5)
    plan.look(1.0)
    assert not plan.next(1.0)
    plan.look(100.0)
    assert {(request.source, request.cell) for request in plan.next(100.0)} == {("publisher", 1), ("publisher", 3)}
    plan.came("reader_1", 1, 101.0)  # late, and good
    plan.came("publisher", 1, 102.0)
    plan.came("publisher", 3, 102.0)
    assert not plan.missing
