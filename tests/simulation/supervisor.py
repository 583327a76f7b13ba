"""A supervisor around the member and the workers under test, as rank/supervisor.py and rank/worker_manager.py are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rolecall.errors import USAGE
from rolecall.gang.member import Action, Batch, Member, Request
from rolecall.gang.protocol import DETACH, FENCE, Answer, Heartbeat, Outcome, WorkerStatus
from rolecall.life import process, workers
from rolecall.life.workers import RankWorkers, Times
from rolecall.messages import worker as messages
from rolecall.record.history import Start
from tests.simulation.clock import Process
from tests.simulation.coordinator import Coordinator
from tests.simulation.network import Post
from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE, PHASE, RULES, SIGKILL, STOP
from tests.simulation.worker import Exit, Worker

TICK_SECONDS = 0.5  # a longer pause of this process counts for no deadline
DUMP_TIMEOUT_SECONDS = 1.0
REPORT_TICKS = 4

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Supervisor(Process):
    """Translates between its member, which decides, and what the simulation models."""

    def __init__(self, simulation: Simulation, rank: Rank) -> None:
        super().__init__(simulation.clock, rank)
        self.simulation = simulation
        simulation.incarnations += 1
        self.incarnation = f"{simulation.incarnations:04x}"
        role = "" if rank.unnamed else rank.role.name
        me = Heartbeat(role, rank.ordinal, self.incarnation, sequence=0, node=rank.node, copied=self._copied())
        self.member = Member(RULES, me, lambda: self.status, now=self.now, is_rank0=rank.first)
        self.workers = RankWorkers(role, Times(LEASE, PHASE), spares=simulation.spares)
        self.processes: dict[int, Worker] = {}
        self.coordinator: Coordinator | None = None
        self.post: Post | None = None
        self.request: Request | None = None  # to be posted
        self.deadline = math.inf  # of the member
        self.action: Action | None = None  # under way
        self.news = self.joined = False
        self.connected = False  # a connection to rank 0 is open
        self.born = self.joined_at = self.clock.now
        self._ticks = 0
        self._due = math.inf  # when time passes for the workers
        self.clock.at(self.clock.random.uniform(0.1, 1.5), self, self._check, role)

    def _copied(self) -> int:
        """The newest generation that its disk knows of."""
        return self.rank.store.known.newest(self.rank.store.held)

    @property
    def status(self) -> WorkerStatus:
        return self.workers.status()

    @property
    def worker(self) -> Worker | None:
        """The rank's own worker, the newest."""
        return None if self.workers.current is None else self.processes[self.workers.current]

    def _check(self, role: str) -> None:
        self.perform(self.workers.check(role, self.now))

    def join(self) -> None:
        if self.rank.first and not self._coordinate():
            return
        self.joined = True
        self.joined_at = self.clock.now
        self.obey(self.member.start(self.now))

    def _coordinate(self) -> bool:
        """Become the coordinator, if nobody is: a process that is frozen keeps its lock, a dead one does not."""
        simulation, disk = self.simulation, self.simulation.disk
        if disk.hangs_until > self.clock.now:
            self.clock.at(0.2, self, self.join)
            return False
        held = disk.coordinator is not None and not disk.coordinator.dead
        if held and simulation.safeguards.coordinator_lock:
            if self.clock.now - self.born > LEASE:
                simulation.story.count("second coordinator kept out")
                self.exit(USAGE)
            else:
                self.clock.at(0.2, self, self.join)
            return False
        if disk.number == 0 and disk.refuses("number"):
            self.exit(USAGE)
            return False
        disk.coordinator = self
        self.coordinator = simulation.lead = Coordinator(simulation, self)
        return True

    # -- what its member decides

    def _send_soon(self) -> None:
        """There is something new to report."""
        if self.joined and not self.news:
            self.news = True
            self.clock.at(0, self, self._changed)

    def obey(self, batch: Batch) -> None:
        """Does what the member says."""
        if batch.request:
            if not self.request:
                self.clock.at(0, self, self._send)
            self.request = batch.request
        if batch.action:
            self.clock.at(0, self, self._act, batch.action)
        if batch.worker == "detach":
            by = self.now + LEASE * (FENCE - DETACH)
            self.perform(self.workers.detach(by, "rank 0 does not answer", self.now))
        elif batch.worker:
            self._kill(self.workers.current, batch.worker)
        if batch.exits and not self.dead:
            assert batch.exit_code is not None
            if self.coordinator:
                self.coordinator.close()
            self.exit(batch.exit_code)
        if batch.deadline != self.deadline:
            self.deadline = batch.deadline
            self.at(self.deadline, self.tick, self.deadline)

    def _changed(self) -> None:
        self.news = False
        self.obey(self.member.changed(self.now))

    def _send(self) -> None:
        request, self.request = self.request, None
        assert request is not None
        if request.beat.heartbeat:
            self.simulation.promises.obeys(self, request.beat.heartbeat)
        self.post = Post(self, request)
        self.clock.at(LEASE / 2, self, self.failed, self.post)
        self.simulation.network.send(self.post)

    def answered(self, post: Post, answer: Answer | str) -> None:
        newest, self.connected = post is self.post, True
        if newest:
            self.post = None
        if isinstance(answer, Answer):
            self.obey(self.member.answered(post.request, answer, self.now))
        elif answer == "full":
            self.obey(self.member.failed(post.request, answer, self.now))
        elif newest:
            self.simulation.refused(self.rank, answer)
            self.obey(self.member.refused(post.request, answer, self.now))

    def failed(self, post: Post) -> None:
        if post is self.post:
            self.post, self.connected = None, False
            self.obey(self.member.failed(post.request, "", self.now))

    # -- workers

    def perform(self, batch: workers.Batch) -> None:
        """Does what its workers' lives require."""
        for effect in batch.effects:
            match effect:
                case workers.Make():
                    self.processes[effect.number] = worker = Worker(self.simulation, self, effect)
                    self.simulation.all_workers.append(worker)
                    self.rank.processes.append(worker)
                    self.simulation.promises.makes(self, worker)
                    self._fork(worker)
                case workers.Do(number, order):
                    self._do(self.processes[number], order)
                case workers.HandOver():
                    self.clock.at(0, self, lambda: self.perform(self.workers.handed_over(self.now)))
                case workers.Refuse(problem):
                    self.simulation.promises.refuses(self, problem)
                    self.exit(USAGE)
                    return
        if self.workers.current is not None:
            self.rank.worker = self.processes[self.workers.current]
        if batch.changed:
            self._send_soon()
        if batch.done:
            self.clock.at(0, self, self._acted)
        if self.processes.keys() != self.workers.lives.keys():
            self.processes = {number: self.processes[number] for number in self.workers.lives}
        if batch.deadline < self._due:
            self._due = min(batch.deadline, self.now + TICK_SECONDS)
            self.at(self._due, self._pass_time, self._due)

    def _pass_time(self, due: float) -> None:
        if due != self._due:
            return
        self._due = math.inf
        if self.now - due > TICK_SECONDS:
            self.workers.suspended(self.now - due)
        self._notice_ends()
        self.perform(self.workers.tick(self.now))

    def _notice_ends(self) -> None:
        for number, worker in self.processes.items():
            if worker.dead and self.workers.lives[number].alive:
                self.workers.exiting(number)

    def _fork(self, worker: Worker) -> None:
        random = self.clock.random
        if self.rank.forks_fail_until > self.clock.now:
            self.clock.at(random.uniform(0.05, 1), self, self._not_forked, worker)
        else:
            self.clock.at(random.choice((0.05, 0.1, 1.5)), None, worker.forked)

    def _do(self, worker: Worker, order: process.Effect) -> None:
        random = self.clock.random
        match order:
            case process.Send(message):
                worker.told |= isinstance(message, messages.Drain)
                if isinstance(message, messages.Detach):
                    self.simulation.promises.told_to_leave(worker)
                worker.down.send(message)
            case process.Record(rows):
                for row in rows:
                    if self.coordinator and isinstance(row, Start):
                        self.coordinator.gang.resumed(row.step)
            case process.LogStacks(silent):
                seconds = random.uniform(0.05, DUMP_TIMEOUT_SECONDS if silent else 0.2)
                self.clock.at(seconds, self, lambda: self.perform(self.workers.dumped(worker.number, self.now)))
            case process.Kill():
                worker.ordered = worker.ordered or {"stopped"}
                self.clock.at(random.uniform(0.01, STOP), None, worker.exit, SIGKILL)

    def _not_forked(self, worker: Worker) -> None:
        worker.dead = True
        self.rank.processes.remove(worker)
        if self.workers.lives[worker.number].is_killed:  # as soon as it exists
            worker.ordered = worker.ordered or {"stopped"}
        self._end(worker, lambda: self.workers.not_forked(worker.number, "cannot fork", self.now, killed=True))

    def _end(self, worker: Worker, end: Callable[[], workers.Batch]) -> None:
        life, is_own = self.workers.lives[worker.number], worker is self.worker and not worker.check
        batch = end()
        self.simulation.promises.ends(worker, life, is_own=is_own)
        self.perform(batch)

    def heard(self, worker: Worker, message: Any) -> None:
        """What comes by the pipe of `worker`: that it exists, its messages, and that it has ended."""
        if message is worker:
            self.perform(self.workers.forked(worker.number, self.now))
        elif not isinstance(message, Exit):
            self.perform(self.workers.received(worker.number, message, self.now))
        else:
            killer = "killed by SIGKILL" if worker.code == SIGKILL else ""
            exit = process.Exit(worker.code, killer)
            self._end(worker, lambda: self.workers.exited(worker.number, exit, self.now))

    def _kill(self, number: int | None, outcome: Outcome) -> None:
        if number is not None:
            worker = self.processes[number]
            self.simulation.story.log(f"{self.rank.name} kills a worker: {outcome}")
            worker.ordered.add(outcome)
            self._notice_ends()
            self.perform(self.workers.kill(number, outcome, self.now))

    # -- actions

    def _act(self, action: Action) -> None:
        self.action = action
        self._notice_ends()
        self.perform(self.workers.carry_out(action, self.now))

    def _acted(self) -> None:
        if not self.joined:
            self.join()
        elif self.action is not None:
            action, self.action = self.action, None
            self.obey(self.member.done(action, self.now))

    # -- time and the end

    def tick(self, deadline: float) -> None:
        if deadline != self.deadline:
            return
        now, life = self.now, self.workers.worker
        self._ticks += 1
        for number, worker in [*self.processes.items()] if self._ticks % REPORT_TICKS == 0 else ():
            if worker.exists and not worker.frozen and worker.up.is_empty:
                self.perform(self.workers.received(number, messages.Report(worker.step), now))
        self.obey(self.member.tick(now, life.last_heartbeat if life else None))
        for number in [*self.workers.spares]:
            if self.member.is_silent(now, self.workers.lives[number].last_heartbeat):
                self._kill(number, "silent")

    def leave(self) -> None:
        self.obey(self.member.leave("SIGTERM", self.now))

    def exit(self, code: int) -> None:
        for worker in self.processes.values():
            self.clock.at(self.clock.random.uniform(0.01, STOP), None, worker.exit, SIGKILL)
        self.die()
        self.simulation.exited(self.rank, code)

    def die(self) -> None:
        self.dead, self.died_at = True, self.clock.now
        self.post = None
        for worker in self.processes.values():
            worker.orphan()
