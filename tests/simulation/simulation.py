"""One schedule: a job and its containers, the parts that act on them, and the run until the gang has settled."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from rolecall.gang.gang import Gang
from rolecall.gang.protocol import OVER, Key, name_of
from rolecall.life.workers import SpareRules
from tests.simulation.ambushes import Ambushes
from tests.simulation.clock import Clock
from tests.simulation.coordinator import Coordinator
from tests.simulation.copies import Store
from tests.simulation.kills import kill_rank
from tests.simulation.network import Network
from tests.simulation.promises import Promises
from tests.simulation.rank import Rank
from tests.simulation.rules import JOBS, RULES, SAFE, Safeguards, enlarged, with_stays
from tests.simulation.schedule import Schedule
from tests.simulation.shared import Disk
from tests.simulation.story import Result, Story
from tests.simulation.supervisor import Supervisor
from tests.simulation.worker import Worker


class Simulation:
    """One schedule. `run` plays it; raises Violation."""

    def __init__(
        self,
        seed: int,
        safeguards: Safeguards = SAFE,
        trace: bool = False,
        ranks: int = 0,
    ) -> None:
        self.seed, self.safeguards, self.size = seed, safeguards, ranks
        self.clock = Clock(Random(f"{seed} run"))
        self.story = Story(seed, self.clock, trace)
        self.disk = Disk()
        self.network = Network(self)
        self.promises = Promises(self)
        self.ambushes = Ambushes(self)
        self.incarnations = 0
        self.lead: Coordinator | None = None
        self.leads: list[Coordinator] = []
        self.workers: dict[tuple[int, Key], Worker] = {}
        self.all_workers: list[Worker] = []
        self.replaced: tuple[Rank, Rank] | None = None
        self.twins = 0
        self.trap = False
        self.over = ""
        self.copies = Random(f"{seed} copies").choice((0,) * 9 + (1, 1, 2))  # of each checkpoint
        self.machines = 0  # that were added
        self.shelf: list[tuple[str, Disk, Store]] = []  # disks of rank 0 on machines that are away
        self.forgotten = False
        plan = Random(f"{seed} plan")
        self._draw_job(plan)
        self.schedule = Schedule(self, plan)

    def _draw_job(self, random: Random) -> None:
        roles = random.choice(JOBS)
        members = Random(f"{self.seed} members")
        if self.copies and members.random() < 0.6:  # some may be away
            roles = members.choice(JOBS[1:4])
        size = Random(f"{self.seed} size")
        if not self.size and size.random() < 0.04:
            self.size = size.randint(6, 30)
        self.roles = enlarged(with_stays(roles) if Random(f"{self.seed} stays").random() < 0.6 else roles, self.size)
        self._specs = {role.name: role for role in self.roles}
        self._spare_count = Random(f"{self.seed} spares").choice((0, 0, 0, 1, 2))
        self.rank0: Key = (self.roles[0].name, 0)
        self.goal = random.choice((6, 20, 10_000, 10_000))
        self.doomed: tuple[str, float] | None = None
        if random.random() < 0.05:
            self.doomed = random.choice(self.roles).name, random.uniform(0.1, 1.5)
        self.doom, self.rules = "raises", RULES
        fate = Random(f"{self.seed} fate")
        if self.doomed and fate.random() < 0.6:  # by what is no failure of a worker's own
            self.doom, self.rules = fate.choice(("killed", "rank killed")), replace(RULES, max_restarts=4)
        assigned, unnamed = random.random() < 0.5, Random(f"{self.seed} unnamed").random() < 0.25
        self.ranks: list[Rank] = []
        for role in self.roles:
            for ordinal in range(role.count):
                first = not self.ranks
                without = unnamed and not first
                configured = None if without or (assigned and role.elastic) else ordinal
                self.ranks.append(Rank(role, configured, f"node{len(self.ranks)}", first, unnamed=without))
        self.first = self.ranks[0]  # where MASTER_ADDR leads to
        if self.doomed:
            self.copies = 0
        crowd = Random(f"{self.seed} crowd")
        if self.copies and crowd.random() < 0.4:  # some are on one machine
            for rank in self.ranks[1:]:
                if crowd.random() < 0.5:
                    rank.machine = crowd.choice(self.ranks).machine
                    rank.store = Store(rank.machine)
        for rank in self.ranks:
            self.clock.at(random.uniform(0, 2), None, self.start, rank)

    # -- the run

    def run(self) -> Result:
        ended = None
        while ended is None and self.clock.advance():
            if self.forgotten:
                return self._result("forgotten", 0.0)
            if self.schedule.calm_at is not None:
                ended = self._settled(self.schedule.calm_at)
        if ended is None:
            self.story.fail("nothing is left to happen")
        assert self.schedule.calm_at is not None
        return self._result(ended, self.clock.now - self.schedule.calm_at)

    def _result(self, state: str, settled_after: float) -> Result:
        generations, story = self.promises.generations, self.story
        return Result(self.seed, state, generations, settled_after, story.events, story.faults)

    def _settled(self, calm_at: float) -> str | None:
        """How it ended, if it did: the job trains with everybody who may join, or is over and everybody knows."""
        if self.over:
            here = [rank.supervisor for rank in self.ranks if rank.supervisor and rank.is_up]
            return None if any(supervisor.member.acknowledged for supervisor in here) else self.over
        lead = self.lead
        if lead is None or self.doomed or not self.trains:
            return None
        well = self.clock.now > calm_at + 1 and not self.outside(lead.gang) and self.promises.copied_since(calm_at)
        return "training" if well else None

    @property
    def trains(self) -> bool:
        """Whether the newest generation makes steps."""
        lead = self.lead
        if lead is None or lead.owner.dead or lead.gang.state != "running":
            return False
        worker = self.workers.get((lead.gang.generation.number, self.rank0))
        return worker is not None and worker.attached and worker.step > worker.base

    def outside(self, gang: Gang) -> list[Key]:
        """The members that are to join the generation of `gang`, since their role stays, and are not in; and those in
        it that rank 0's worker has given up."""
        generation, joining = gang.generation, {role.name for role in self.roles if role.stays and role.elastic}
        members, first = gang.members.items(), self.workers.get((generation.number, self.rank0))
        given_up = first.session.given_up if first and first.session else set[tuple[str, int]]()
        kept = [key for key, part in generation.parts.items() if (name_of(key), part.number) in given_up]
        return [
            *(key for key in kept if key not in generation.lost_keys),
            *(key for key, each in members if key[0] in joining and not each.leaving and not generation.has(key, each)),
        ]

    # -- the containers

    def start(self, rank: Rank) -> None:
        if rank.away_until > self.clock.now:
            self.clock.at(rank.away_until - self.clock.now, None, self.start, rank)
        elif rank.wanted and not self.over and not rank.is_up:
            rank.frozen_until = 0.0
            if rank.first and self.disk.done_refused and self.disk.done is None:
                self.forgotten = True  # it was logged as an error that a restart would train on
            rank.supervisor = Supervisor(self, rank)
            self.story.log(f"{rank.name} starts as {rank.supervisor.incarnation}")

    def report_crash(self, rank: Rank) -> None:
        """Whoever started `rank` tells rank 0's coordinator that its process has ended."""
        known = rank.ordinal is not None and not rank.twins and not rank.first
        if known and self.lead and not self.lead.owner.dead:
            self.lead.crashed((rank.role.name, rank.ordinal or 0))

    def exited(self, rank: Rank, code: int) -> None:
        self.story.log(f"{rank.name} exits with {code}")
        lead = self.lead
        if rank.first and lead and lead.owner.rank is rank and lead.gang.state in OVER and lead.gang.code == code:
            self.over = lead.gang.state
            return
        if code == 0 and lead and lead.gang.state == "finished":
            return
        if rank.wanted:
            self.hurt(rank, 15, "will be started again")
            self.clock.at(self.clock.random.uniform(0.5, 3), None, self.start, rank)

    def refused(self, rank: Rank, reason: str) -> None:
        """One of two containers of one ordinal is not let in, and goes. With copies that rank 0 does not know of, all
        are to be started again."""
        self.promises.refused(rank, reason)
        if reason == "copies":
            self.story.count("run with older copies ended")
            for each in self.ranks:
                self.hurt(each, 15, "is to start again with the others")
            self.clock.at(self.clock.random.uniform(1, 3), None, self._end_run)
            return
        self.twins -= 1
        rank.wanted = False

    def _end_run(self) -> None:
        """Somebody ends the run: it goes on once all are started again."""
        if lead := self.lead:
            kill_rank(self, self.clock.random, lead.owner.rank)

    def hurt(self, rank: Rank, seconds: float, what: str) -> None:
        """A fault of `rank`, which excuses it for so long."""
        self.story.log(f"** {rank.name}: {what}")
        rank.hurt_until = max(rank.hurt_until, self.clock.now + seconds)

    def any_rank(self, random: Random) -> Rank:
        return random.choice([rank for rank in self.ranks if rank.wanted])

    def others(self, rank: Rank) -> int:
        """How many of its role there are in the end without it."""
        others = (other for other in self.ranks if other.role is rank.role and other is not rank)
        return sum(other.wanted and not other.cut_for_good for other in others)

    def elastic(self, key: Key) -> bool:
        return self._specs[key[0]].elastic

    def stays(self, key: Key) -> bool:
        return key[0] in self._specs and self._specs[key[0]].stays  # a check may be for no role

    def spares(self, role: str) -> SpareRules:
        """How many spares a rank with `role` keeps."""
        return SpareRules(self._spare_count if self._specs[role].stays else 0, pause=1.0)
