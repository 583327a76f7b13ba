"""A simulation of the protocol of docs/ps.md, against which the formulas of `scale_model` are checked.

Every processor and every direction of a link is a queue that serves one thing at a time, in the order of arrival.
Nothing in it is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from bench.scale_model import Costs, Plan, Work


class Queue:
    """A processor, or one direction of a link."""

    def __init__(self) -> None:
        self.free_at = self.busy_s = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When what arrives at `now` and needs `seconds` is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


class Simulation:
    """Trainers, servers and the lead, which is the first server, between queues."""

    def __init__(self, costs: Costs, plan: Plan) -> None:
        self.costs, self.plan, self.work = costs, plan, Work.of(costs, plan)
        n, s = plan.trainers, plan.servers
        shared = [Queue() for _ in range(plan.server_cores or s)]
        self.servers = [shared[number % len(shared)] for number in range(s)]
        cores = [Queue() for _ in range(plan.trainer_cores or n)]
        self.trainers = [cores[number % len(cores)] for number in range(n)]
        self.up, self.down = [Queue() for _ in range(n)], [Queue() for _ in range(n)]  # of trainers
        self.into, self.out = [Queue() for _ in range(s)], [Queue() for _ in range(s)]  # of servers
        self.pushes: list[float] = []  # when each was answered, whole
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._number = 0
        self.reports = self.reported = 0  # of servers to the lead, and the gradients in them
        self._unreported: list[list[int]] = [[] for _ in range(s)]  # gradients that the next report will have
        self._reporting = [False] * s
        self._here = [0] * n  # servers that have reported the trainer's gradient
        self._answered = [0] * n
        self._computed = [True] * n  # the next gradient, where it overlaps
        self._back = [False] * n
        self._open: list[int] = []  # gradients that wait for the update
        self._queue: list[list[int]] = []  # updates that wait for the one under way
        self._done = 0  # servers that have made the update under way

    def run(self, updates: int) -> float:
        """Pushes a second over `updates` (at least 2) pushes of each trainer, of which the first third warms up."""
        for trainer in range(self.plan.trainers):
            self._computed[trainer] = False
            self._at(self.plan.compute_s, self._compute, trainer)
            self._back[trainer] = True
        while self._events and len(self.pushes) < updates * self.plan.trainers:
            now, _, what, arguments = heapq.heappop(self._events)
            what(now, *arguments)
        # from the end of one round of pushes to the end of another
        warm = max(1, updates // 3) * self.plan.trainers
        return (len(self.pushes) - warm) / (self.pushes[-1] - self.pushes[warm - 1])

    def _at(self, when: float, what: Callable[..., None], *arguments: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, arguments))

    # the way up

    def _compute(self, now: float, trainer: int) -> None:
        """A gradient is computed; it leaves once the answer to the last one is here."""
        self._computed[trainer] = True
        self._send(now, trainer)

    def _send(self, now: float, trainer: int) -> None:
        if not (self._computed[trainer] and self._back[trainer]):
            return
        self._computed[trainer] = self._back[trainer] = False
        if self.plan.overlap:
            self._at(now + self.plan.compute_s, self._compute, trainer)
        each, servers = self.work.trainer / 2 / self.plan.servers, self.plan.servers
        for place in range(servers):
            server = (trainer + place) % servers
            ready = self.trainers[trainer].take(now, each)
            sent = self.up[trainer].take(ready, self.work.link)
            self._at(sent + self.plan.delay_s, self._arrive, trainer, server)

    def _arrive(self, now: float, trainer: int, server: int) -> None:
        # cut through: a link that is free adds nothing to what the sender's link took
        begin = max(now - self.work.link, self.into[server].free_at)
        received = self.into[server].take(begin, self.work.link)
        self._at(max(now, received), self._serve, trainer, server)

    def _serve(self, now: float, trainer: int, server: int) -> None:
        self._at(self.servers[server].take(now, self.work.server_in), self._complete, trainer, server)

    def _complete(self, now: float, trainer: int, server: int) -> None:
        """A server has a gradient, which it reports at once or once the lead has answered its last report."""
        if server == 0:
            self._take(now, trainer)
            return
        self._unreported[server].append(trainer)
        if not self._reporting[server]:
            self._report(now, server)

    def _report(self, now: float, server: int) -> None:
        trainers, self._unreported[server] = self._unreported[server], []
        self._reporting[server] = bool(trainers)
        if trainers:
            self.reports, self.reported = self.reports + 1, self.reported + len(trainers)
            sent = self.servers[server].take(now, self.work.report_out)
            self._at(sent + self.plan.delay_s, self._reported, server, *trainers)

    # the lead

    def _reported(self, now: float, server: int, *trainers: int) -> None:
        now = self.servers[0].take(now, self.work.report_in + len(trainers) * self.work.key_in)
        self._at(now + self.plan.delay_s, self._report, server)
        for trainer in trainers:
            self._take(now, trainer)

    def _take(self, now: float, trainer: int) -> None:
        plan = self.plan
        self._here[trainer] += 1
        if self._here[trainer] < plan.servers:
            return
        self._here[trainer] = 0
        now = self.servers[0].take(now, self.work.ledger)
        self._open.append(trainer)
        if plan.mode == "async" or len(self._open) == plan.trainers:
            self._queue.append(self._open)
            self._open = []
            if len(self._queue) == 1:
                self._at(now, self._order)

    def _order(self, now: float) -> None:
        """Orders the oldest update of those that wait, at one server after the other."""
        others = self.plan.servers - 1
        for server in range(1, self.plan.servers):
            sent = self.servers[0].take(now, self.work.order / others)
            self._at(sent + self.plan.delay_s, self._update, server)
        self._at(self.servers[0].free_at if others else now, self._update, 0)

    def _update(self, now: float, server: int) -> None:
        now = self.servers[server].take(now, self.work.update)
        for trainer in self._queue[0]:
            leaves = self.servers[server].take(now, self.work.server_out)
            sent = self.out[server].take(leaves, self.work.link)
            self._at(sent + self.plan.delay_s, self._answer, trainer)
        self._at(self.servers[server].free_at + self.plan.delay_s * bool(server), self._made)

    def _made(self, now: float) -> None:
        self._done += 1
        if self._done == self.plan.servers:
            self._done = 0
            self._queue.pop(0)
            if self._queue:
                self._at(now, self._order)

    # the way down

    def _answer(self, now: float, trainer: int) -> None:
        begin = max(now - self.work.link, self.down[trainer].free_at)
        received = max(now, self.down[trainer].take(begin, self.work.link))
        here = self.trainers[trainer].take(received, self.work.trainer / 2 / self.plan.servers)
        self._answered[trainer] += 1
        if self._answered[trainer] == self.plan.servers:
            self._answered[trainer] = 0
            self._at(here, self._over, trainer)

    def _over(self, now: float, trainer: int) -> None:
        self.pushes.append(now)
        self._back[trainer] = True
        if self.plan.overlap:
            self._send(now, trainer)
        else:
            self._at(now + self.plan.compute_s, self._compute, trainer)
