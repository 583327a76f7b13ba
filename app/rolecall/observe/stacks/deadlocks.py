"""Who waits for whom, from the stacks and the pending calls of all ranks. Pure.

Threads are the nodes of a graph. A thread waits for groups of threads: it continues once one thread of each group does.
Threads that may continue are removed one after the other; the waiting threads that remain are deadlocked. A thread that
waits for a condition, or for an answer that is given later, may be released by a call of any rank: it counts as
deadlocked only if no rank has any activity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.observe.stacks.threads import Call, Rank, Thread

Node = tuple[str, int]  # a rank, and its thread's number; a call that no thread waits for has a negative one
Group = frozenset[Node]


@dataclass(frozen=True)
class Wait:
    """`rank` waits for `to`, for `seconds` if known: for the answer of the call `what`, or in a collective
    operation of that name."""

    rank: str
    to: str
    what: str
    seconds: float | None = None

    def __str__(self) -> str:
        time = "" if self.seconds is None else f" {self.seconds:.1f} s"
        return f"{self.rank} waits{time} for {self.to} ({self.what})"


@dataclass(frozen=True)
class Conclusions:
    """Who waits for whom. `deadlocks` are circles of ranks, the first one named again at the end; `active` are ranks
    with any activity, or that are unknown; `exhausted` are those that carry out as many calls as they may."""

    waits: tuple[Wait, ...] = ()
    deadlocks: tuple[tuple[str, ...], ...] = ()
    active: tuple[str, ...] = ()
    exhausted: tuple[str, ...] = ()


def look(ranks: Iterable[Rank]) -> Conclusions:
    """Who waits for whom in `ranks`."""
    graph = _Graph({rank.name: rank for rank in ranks})
    stuck, waits, active = graph.stuck(), graph.waits(), graph.active()
    deadlocks = _circles(graph.edges(stuck))
    if not active:  # then no rank fulfils a condition either
        several = [circle for circle in _circles(graph.edges(stuck, conditions=True)) if len({*circle}) > 1]
        known = [{*circle} for circle in deadlocks]
        deadlocks += tuple(circle for circle in several if {*circle} not in known)
    exhausted = tuple(name for name, rank in graph.ranks.items() if rank.exhausted)
    return Conclusions(waits, deadlocks, active, exhausted)


@dataclass
class _Graph:
    ranks: Mapping[str, Rank]
    _threads: dict[Node, Thread] = field(default_factory=dict)
    _calls: dict[Node, list[Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in self.ranks.values():
            callers = {call.thread for call in rank.calls}
            for thread in rank.threads:
                if not thread.idle and (not thread.in_background or thread.number in callers):
                    self._threads[rank.name, thread.number] = thread
            for number, call in enumerate(rank.calls):
                node = rank.name, call.thread
                # the thread of an asynchronous call does not wait for it
                self._calls.setdefault(node if node in self._threads else (rank.name, -number - 1), []).append(call)

    # ---- what a node waits for

    def _nodes(self, name: str, but: Node) -> Group:
        """The nodes of a rank, other than one of them."""
        return frozenset(node for node in {*self._threads, *self._calls} if node[0] == name and node != but)

    def _serving(self, call: Call) -> Group:
        """The threads that may serve `call`; if its rank carries out no further one, those that must end before."""
        callee = self.ranks.get(call.to)
        if callee is None:
            return frozenset()
        threads = [each for each in callee.threads if call.method in each.served]
        if not threads and callee.exhausted:
            threads = [*callee.serving]
        return frozenset((call.to, each.number) for each in threads)

    def _missing(self, rank: Rank) -> list[Node]:
        """The main threads of the members of `rank`'s role that are in no collective operation."""
        others = [each for each in self.ranks.values() if each.role == rank.role and each.running]
        late = [each for each in others if not any(thread.collective for thread in each.threads)]
        return [(each.name, thread.number) for each in late for thread in each.threads if thread.main]

    def _groups(self, node: Node) -> list[Group]:
        """The groups that `node` waits for, as far as known."""
        thread, rank = self._threads.get(node), self.ranks[node[0]]
        if thread and thread.at_a_lock:
            return [others] if (others := self._nodes(node[0], node)) else []
        if thread and thread.collective:
            return [frozenset({missing}) for missing in self._missing(rank)]
        if calls := self._calls.get(node):
            answers = [self._serving(call) for call in calls]  # any answer may make it continue
            return [frozenset().union(*answers)] if all(answers) else []
        return []

    # ---- deadlocks

    def stuck(self) -> set[Node]:
        """The nodes that can never continue."""
        nodes = {*self._threads, *self._calls}
        stuck = {node for node in nodes if node not in self._threads or self._threads[node].waits}
        if not self.active():
            return stuck
        groups = {node: self._groups(node) for node in stuck}
        while free := {node for node in stuck if not any(group <= stuck for group in groups[node])}:
            stuck -= free
        return stuck

    def edges(self, stuck: set[Node], conditions: bool = False) -> dict[Node, set[Node]]:
        """The nodes that each `stuck` node waits for; with `conditions` also those that may fulfil them."""
        edges: dict[Node, set[Node]] = {}
        for node in stuck:
            to = {other for group in self._groups(node) for other in group}
            if conditions:
                for call in self._calls.get(node, ()):
                    to |= self._serving(call) or self._nodes(call.to, node)
                if not to:
                    to |= self._nodes(node[0], node)
            edges[node] = to & stuck
        return edges

    def active(self) -> tuple[str, ...]:
        """Ranks with any activity, or that are unknown."""
        going = {node[0] for node, thread in self._threads.items() if not thread.waits}
        return tuple(name for name, rank in self.ranks.items() if name in going or not rank.running)

    def waits(self) -> tuple[Wait, ...]:
        """Who waits for whom, the longest wait first."""
        waits = []
        for rank in self.ranks.values():
            calls: dict[tuple[str, str], float] = {}
            for call in rank.calls:
                calls[call.to, call.method] = max(calls.get((call.to, call.method), 0.0), call.seconds)
            waits += [Wait(rank.name, to, method, seconds) for (to, method), seconds in calls.items()]
            for operation in {thread.collective for thread in rank.threads if thread.collective and thread.waits}:
                waits += [Wait(rank.name, name, operation) for name, _ in self._missing(rank)]
        return tuple(sorted(waits, key=lambda wait: (-(wait.seconds or 0.0), wait.rank, wait.to)))


def _circles(edges: Mapping[Node, Iterable[Node]]) -> tuple[tuple[str, ...], ...]:
    """The shortest circle through each node, as ranks; each set of ranks once."""
    circles: dict[frozenset[str], tuple[str, ...]] = {}
    for start in sorted(edges):
        before: dict[Node, Node] = {}
        queue = deque([start])
        while queue and start not in before:
            node = queue.popleft()
            for to in sorted(edges.get(node, ())):
                if to not in before:
                    before[to] = node
                    queue.append(to)
        if start not in before:
            continue
        path = [start]
        while len(path) == 1 or path[-1] != start:
            path.append(before[path[-1]])
        ranks = _ranks(path[::-1])
        if len(ranks) > 1 and frozenset(ranks) not in circles:
            circles[frozenset(ranks)] = ranks
    return tuple(sorted(circles.values(), key=lambda circle: (len(circle), circle)))


def _ranks(path: Sequence[Node]) -> tuple[str, ...]:
    """The ranks of a closed path, beginning with the first by name; a path within a rank names it twice."""
    names = [node[0] for node in path]
    ranks = [name for place, name in enumerate(names[:-1]) if name != names[place - 1 if place else -2]]
    if not ranks:
        return names[0], names[0]
    first = ranks.index(min(ranks))
    ranks = ranks[first:] + ranks[:first]
    return *ranks, ranks[0]
