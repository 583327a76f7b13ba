"""A model of rolecall/rank/supervisor.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolecall.gang.protocol import FAILED, USAGE, Order, Report
from tests.simulation.clock import Process
from tests.simulation.coordinator import Lead
from tests.simulation.network import Post
from tests.simulation.rank import Rank
from tests.simulation.rules import FENCE, LEASE, RULES, WATCH
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Supervisor(Process):
    """One request at a time, cancelled when there is news; one order at a time."""

    def __init__(self, simulation: Simulation, rank: Rank) -> None:
        super().__init__(simulation.clock)
        self.simulation, self.rank = simulation, rank
        simulation.incarnations += 1
        self.incarnation = f"{simulation.incarnations:04x}"
        self.worker: Worker | None = None
        self.order: Order | None = None
        self.post: Post | None = None
        self.leaving = self.heard = self.busy = self.news = self.joined = False
        self.connected = False  # a connection to rank 0 is open
        self.born = self.contact = self.joined_at = self.clock.now
        self.code: int | None = None
        self.beat = self.acted = 0
        self.knocks = 0
        self.pending: Order | None = None
        self.clock.at(self.clock.random.uniform(0.3, 2.5), self, self.join)

    def join(self) -> None:
        if self.rank.first and not self._coordinate():
            return
        self.joined = True
        self.joined_at = self.contact = self.clock.now
        self.tell()

    def _coordinate(self) -> bool:
        """Become the coordinator, if nobody is: a process that is frozen keeps its lock, a dead one does not."""
        simulation, disk = self.simulation, self.simulation.disk
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
        simulation.lead = Lead(simulation, self)
        return True

    # -- requests

    def tell_later(self) -> None:
        if self.joined and not self.news:
            self.news = True
            self.clock.at(0, self, self.tell)

    def tell(self) -> None:
        self.news = False
        self.beat += 1
        worker, told = self.worker, {}
        if worker:
            told = {
                "generation": worker.generation, "state": worker.state, "outcome": worker.outcome,
                "error": worker.error, "step": worker.step, "drains_failed": worker.drains_failed,
                "gave_up": tuple(worker.gave_up), "summary": {"step": worker.step} if worker.outcome else {},
            }  # fmt: skip
        report = Report(
            self.rank.role.name, self.rank.ordinal, self.incarnation, self.beat, self.rank.node, self.acted,
            leaving=self.leaving, heard=self.heard, **told,
        )  # fmt: skip
        self.post = Post(self, report, self.order, self.clock.now)
        self.clock.at(LEASE / 2, self, self.failed, self.post)
        self.simulation.network.send(self.post)

    def answered(self, post: Post, answer: Order | str) -> None:
        if post is not self.post:
            return
        self.connected = True
        if answer == "full" or self.clock.now - post.asked > LEASE * FENCE:  # too late: it may have been given up
            self.failed(post)
            return
        if isinstance(answer, str):
            self.simulation.refused(self.rank, answer)
            self.exit(USAGE)
            return
        self.contact, self.knocks = post.asked, 0
        if post.report.heard:
            self.finish(answer.code)
        if answer != self.order:
            self.order = answer
            self.clock.at(0, self, self.obey)
        self.tell()

    def failed(self, post: Post) -> None:
        if post is not self.post:
            return
        self.post, self.connected = None, False
        silence = self.clock.now - self.contact
        if (self.leaving or self.heard) and silence > LEASE * FENCE:
            self.exit(self.order.code if self.heard and self.order else 0)
        elif silence > RULES.rejoin_timeout:
            self.exit(USAGE)
        else:
            self.knocks += 1
            self.clock.at(0.2, self, self.knock, self.knocks)

    def knock(self, knocks: int) -> None:
        if self.post is None and knocks == self.knocks:
            self.tell()

    # -- orders

    def obey(self) -> None:
        if self.busy or self.order is None or self.order is self.pending:
            return
        order = self.pending = self.order
        worker = self.worker
        if worker and worker.alive and (order.kind != "run" or worker.generation != order.generation):
            self.busy = True
            worker.kill("stopped")
            self.pending = None  # it goes on when the worker has ended
            return
        if order.kind == "run":
            if worker is None or worker.generation != order.generation:
                self.start_worker(order)
            elif worker.alive:
                worker.lost |= set(order.lost)
                worker.drain = worker.drain or order.drain
        self.acted = order.epoch
        self.tell_later()
        if order.kind == "leave":
            self.exit(0)
        elif order.kind in ("finished", "failed"):
            self.heard = True

    def start_worker(self, order: Order) -> None:
        key = (self.rank.role.name, order.ordinal)
        self.worker = self.rank.worker = Worker(self.simulation, self, key, order)
        self.simulation.all_workers.append(self.worker)
        self.arm()

    def worker_ended(self, worker: Worker) -> None:
        if worker is not self.worker:
            return
        self.tell_later()
        if self.busy:
            self.busy = False
            self.obey()

    # -- the watch

    def arm(self) -> None:
        due = self.contact + self.simulation.safeguards.fence * LEASE - self.clock.now
        self.clock.at(max(due, 0.0) + self.clock.random.uniform(0, WATCH), self, self.watch, self.worker)

    def watch(self, worker: Worker) -> None:
        if worker is not self.worker or not worker.alive:
            return
        silence = self.clock.now - self.contact
        if silence <= self.simulation.safeguards.fence * LEASE:
            self.arm()
        elif self.clock.now - self.thawed_at < 0.02:
            self.clock.at(self.clock.random.uniform(0, WATCH - 0.02), self, self.watch, worker)
        else:
            self.simulation.story.say(f"{self.rank.name} fences its worker")
            worker.kill("stopped")

    def check_silent(self, worker: Worker) -> None:
        if worker is self.worker and worker.frozen:
            worker.kill("silent")

    # -- the end

    def leave(self) -> None:
        if self.order is None or self.code is not None:
            self.exit(self.code or 0)
            return
        self.leaving = True
        self.tell_later()
        self.clock.at(RULES.drain_timeout + LEASE / 2, self, self.exit, FAILED)

    def finish(self, code: int) -> None:
        """The job is over, and the coordinator knows that this rank knows."""
        if self.code is None:
            self.code = code
        if not self.rank.first:
            self.exit(code)

    def exit(self, code: int) -> None:
        if not self.dead:
            self.code = code
            if self.worker and self.worker.alive:
                self.worker.kill("stopped")
            self.die()
            self.simulation.exited(self.rank, code)

    def die(self) -> None:
        self.dead, self.died_at = True, self.clock.now
        self.post = None
        if self.worker and self.worker.alive and not self.worker.why:
            self.worker.orphan()
