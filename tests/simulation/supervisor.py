"""A model of rolecall/rank/supervisor.py around the member under test: process, timers, and one request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolecall.errors import USAGE
from rolecall.gang.member import Action, Batch, Request
from rolecall.gang.protocol import Answer, Directive, Heartbeat, WorkerStatus
from tests.simulation.clock import Process
from tests.simulation.coordinator import Coordinator
from tests.simulation.network import Post
from tests.simulation.rank import Rank
from tests.simulation.rules import LEASE, PATIENCE, RULES
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Supervisor(Process):
    """Translates between its member, which decides, and what the simulation models."""

    def __init__(self, simulation: Simulation, rank: Rank) -> None:
        super().__init__(simulation.clock)
        self.simulation, self.rank = simulation, rank
        simulation.incarnations += 1
        self.incarnation = f"{simulation.incarnations:04x}"
        role = "" if rank.unnamed else rank.role.name
        me = Heartbeat(role, rank.ordinal, self.incarnation, sequence=0, node=rank.node)
        self.member = simulation.code.member(RULES, me, lambda: self.status, now=self.clock.now, is_rank0=rank.first)
        self.worker: Worker | None = None
        self.coordinator: Coordinator | None = None
        self.post: Post | None = None
        self.request: Request | None = None  # to be posted
        self.deadline = float("inf")  # of the member
        self.action: Action | None = None  # under way
        self.news = self.joined = False
        self.connected = False  # a connection to rank 0 is open
        self.born = self.joined_at = self.clock.now
        self.clock.at(self.clock.random.uniform(0.3, 2.5), self, self.join)

    @property
    def status(self) -> WorkerStatus:
        return self.worker.status if self.worker else WorkerStatus()

    def join(self) -> None:
        if self.rank.first and not self._coordinate():
            return
        self.joined = True
        self.joined_at = self.clock.now
        self.perform(self.member.start(self.clock.now))

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

    # -- requests

    def perform(self, batch: Batch) -> None:
        """Do what the member says."""
        if batch.request:
            if not self.request:
                self.clock.at(0, self, self.send)
            self.request = batch.request
        if batch.action:
            self.clock.at(0, self, self.act, batch.action)
        if batch.worker == "detach" and self.worker and self.worker.attached:
            self.detach(self.worker, "rank 0 is silent")
        elif batch.worker and self.worker and self.worker.alive:
            self.simulation.story.log(f"{self.rank.name} kills its worker: {batch.worker}")
            self.worker.kill(batch.worker)
        if batch.exits and not self.dead:
            assert batch.exit_code is not None
            if self.coordinator:
                self.coordinator.close()
            self.exit(batch.exit_code)
        if batch.deadline != self.deadline:
            self.deadline = batch.deadline
            self.clock.at(max(0.0, self.deadline - self.clock.now), self, self.tick, self.deadline)

    def send_soon(self) -> None:
        """There is something new to report."""
        if self.joined and not self.news:
            self.news = True
            self.clock.at(0, self, self.changed)

    def changed(self) -> None:
        self.news = False
        self.perform(self.member.changed(self.clock.now))

    def send(self) -> None:
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
            self.perform(self.member.answered(post.request, answer, self.clock.now))
        elif answer == "full":
            self.perform(self.member.failed(post.request, answer, self.clock.now))
        elif newest:
            self.simulation.refused(self.rank, answer)
            self.perform(self.member.refused(post.request, answer, self.clock.now))

    def failed(self, post: Post) -> None:
        if post is self.post:
            self.post, self.connected = None, False
            self.perform(self.member.failed(post.request, "", self.clock.now))

    # -- actions

    def act(self, action: Action) -> None:
        self.action, directive, worker = action, action.directive, self.worker
        match action.kind:
            case "start" | "load":
                key = (directive.role, directive.ordinal)
                self.worker = self.rank.worker = Worker(self.simulation, self, key, directive)
                self.simulation.all_workers.append(self.worker)
                return  # `worker_forked` follows
            case "end" if worker and worker.alive:
                worker.kill("stopped")
                return  # `worker_ended` follows
            case "detach" if worker and worker.attached:
                self.detach(worker)
                return  # `worker_detached` or `worker_ended` follows
            case "attach" if worker and worker.alive:
                worker.attach(directive)
            case "update" if worker and worker.alive:
                self._update(worker, directive)
        self.acted()

    def _update(self, worker: Worker, directive: Directive) -> None:
        if directive.kind == "load":
            worker.relabel(directive)
        else:
            worker.update(directive)
            if directive.kind == "run":
                self.simulation.promises.knows(worker)
            worker.drain = worker.drain or directive.drain
            worker.told = worker.told or directive.drain

    def detach(self, worker: Worker, problem: str = "") -> None:
        """Tell the worker to leave its generation; one that does not is killed."""
        worker.detach(problem)
        self.clock.at(PATIENCE, self, self._lose_patience, worker, worker.part)

    def _lose_patience(self, worker: Worker, part: tuple[int, int]) -> None:
        if worker.attached and part == worker.part:
            worker.kill("stopped")

    def worker_detached(self, worker: Worker) -> None:
        if worker is self.worker:
            self.send_soon()
            if self.action and self.action.kind == "detach":
                self.acted()

    def acted(self) -> None:
        assert self.action is not None
        action, self.action = self.action, None
        self.perform(self.member.done(action, self.clock.now))

    def worker_forked(self, worker: Worker) -> None:
        if worker is self.worker and self.action and self.action.kind in ("start", "load"):
            self.acted()

    def worker_ended(self, worker: Worker) -> None:
        if worker is self.worker:
            self.send_soon()
            if self.action:
                self.acted()

    # -- time and the end

    def tick(self, deadline: float) -> None:
        if deadline == self.deadline:
            heard_at = self.worker.last_heartbeat if self.worker else None
            self.perform(self.member.tick(self.clock.now, heard_at))

    def leave(self) -> None:
        self.perform(self.member.leave("SIGTERM", self.clock.now))

    def exit(self, code: int) -> None:
        if self.worker and self.worker.alive:
            self.worker.kill("stopped")
        self.die()
        self.simulation.exited(self.rank, code)

    def die(self) -> None:
        self.dead, self.died_at = True, self.clock.now
        self.post = None
        if self.worker and self.worker.alive and not self.worker.why:
            self.worker.orphan()
