"""The network between the ranks and rank 0: delay, loss, duplicates, cuts in one or both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolecall.gang.member import Request
from rolecall.gang.protocol import Answer
from tests.simulation.rank import Rank

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.simulation import Simulation
    from tests.simulation.supervisor import Supervisor

QUIET = (0.0, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class Post:
    """A member's request to the coordinator."""

    sender: Supervisor
    request: Request


class Network:
    """Carries requests and answers, as TCP does: in a connection what was cut off arrives after the cut."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.storm = QUIET  # until, loss, duplicates, delay

    def cut(self, rank: Rank) -> bool:
        return rank.cut_to > self.clock.now or rank.cut_from > self.clock.now

    def send(self, post: Post) -> None:
        clock, first = self.clock, self.simulation.first
        rank, lead = post.sender.rank, self.simulation.lead
        delay = self._delay(rank)
        if not rank.first:
            if not post.sender.connected and self._unconnectable(rank):
                return
            if (until := max(rank.cut_to, first.cut_to)) > clock.now:
                if clock.random.random() < 0.7 or until == float("inf"):
                    return
                delay += until - clock.now  # the kernel sends it again after the cut
            elif self._lost(rank):
                return
            if lead and lead.owner.rank is not first:
                lead = None  # MASTER_ADDR leads to a container whose coordinator waits for the lock
        elif lead and lead.owner is not post.sender:
            lead = None
        if lead is None or lead.owner.dead:
            clock.at(delay, post.sender, post.sender.failed, post)
            return
        clock.at(delay, lead.owner, lead.receive, post)
        clock.at(delay, None, self._unanswered, post, lead)
        if not rank.first and self.storm[0] > clock.now and clock.random.random() < self.storm[2]:
            clock.at(delay + clock.random.uniform(0, 10), lead.owner, lead.receive, post)

    def reply(self, post: Post, answer: Answer | str) -> None:
        clock, rank = self.clock, post.sender.rank
        delay = self._delay(rank)
        until = 0.0 if rank.first else max(rank.cut_from, self.simulation.first.cut_from)
        if until > clock.now:
            if clock.random.random() < 0.7 or until == float("inf"):
                return
            delay += until - clock.now
        elif self._lost(rank):
            return
        clock.at(delay, post.sender, post.sender.answered, post, answer)

    def _delay(self, rank: Rank) -> float:
        now, random = self.clock.now, self.clock.random
        if rank.slow[0] > now:  # rank 0 too may be short of CPU time
            return random.uniform(0.001, rank.slow[1])
        if rank.first:
            return 0.001
        if self.storm[0] > now:
            return 0.001 + self.storm[3] * random.random() ** 4
        return random.uniform(0.001, 0.03)

    def _lost(self, rank: Rank) -> bool:
        return not rank.first and self.storm[0] > self.clock.now and self.clock.random.random() < self.storm[1]

    def _unconnectable(self, rank: Rank) -> bool:
        """A new connection needs both ways."""
        return any(each.cut_from > self.clock.now and not each.proxied for each in (rank, self.simulation.first))

    def _unanswered(self, post: Post, lead: Coordinator) -> None:
        if lead.owner.dead and self.clock.random.random() < 0.9:  # the connection is refused or reset
            self.clock.at(0.001, post.sender, post.sender.failed, post)
