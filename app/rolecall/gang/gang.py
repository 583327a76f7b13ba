"""The gang: who is in, which generation runs, what each member must do. Pure logic: no I/O, the clock is passed in.

A *generation* is a fixed set of members, each with a fresh worker. `receive` takes a member's `Heartbeat`; `directive`
says what a member must do; `tick` moves time on and returns the one thing that must reach the disk before the gang
goes on (a new generation's number, or DONE), which the caller confirms with `confirm`, or gives up with `burn` where it
is due no more; `pump` holds that loop.

Safety rests on three rules. A generation starts only when every worker of the one before is known to be stopped, or its
member has been silent for a whole lease (a member that gets no answer for that long ends its own worker: fencing). A
member is known to be stopped only by a heartbeat sent after it carried out a directive to stop, which is why directives
are numbered by epochs: they exceed those of earlier coordinators too, which members bring with them. Generation numbers
are persisted before use.
"""

from __future__ import annotations

from rolecall.errors import FAILED, USAGE
from rolecall.gang.orders import Orders
from rolecall.gang.protocol import (
    ACTIVE,
    AWAITED,
    ERRORS,
    HOLD,
    OVER,
    Effect,
    Heartbeat,
    Key,
    Verdict,
    WorkerStatus,
    name_of,
)
from rolecall.gang.roster import Generation, MemberRecord, same_node
from rolecall.gang.wire import text_of


class Gang(Orders):
    """The coordinator's decisions: what heartbeats and time do to the gang, and what each member must do."""

    # ---- heartbeats in

    def receive(self, heartbeat: Heartbeat, now: float) -> Key:
        """Takes a member's heartbeat. Returns the member's key. Raises RejectedError."""
        key = self._roster.place(heartbeat, self.members)
        known = self.members.get(key)
        if known and known.heartbeat.incarnation == heartbeat.incarnation:
            if heartbeat.sequence <= known.sequence:
                return key
            self.epoch = max(self.epoch, heartbeat.epoch)
            known.heartbeat, known.revision = heartbeat, -1
        else:
            if known:
                self._replaced(key, known, heartbeat, now)
            # it counts as stopped after a directive of this gang, whatever it has carried out before
            self.epoch = max(self.epoch, heartbeat.epoch) + 1
            self.members[key] = known = MemberRecord(heartbeat, now, self.epoch, heartbeat.sequence)
        if heartbeat.leaving:
            self._leavers.add(key)
        else:
            self._leavers.discard(key)
        self.number = max(self.number, heartbeat.worker.generation)  # it was used and could not be persisted
        self._hear(key, known, heartbeat.sequence, now)
        return key

    def renew(self, incarnation: str, sequence: int, since: int, now: float) -> Key | None:
        """Takes a beat of a member whose heartbeat of the sequence number `since` still holds. Returns the member's
        key; None where the gang does not have that heartbeat: the beat counts for nothing."""
        key = self._roster.place_of(incarnation)
        known = self.members.get(key) if key else None
        if known is None or (known.heartbeat.incarnation, known.heartbeat.sequence) != (incarnation, since):
            return None
        if key and sequence > known.sequence:
            self._hear(key, known, sequence, now)
        return key

    def _hear(self, key: Key, member: MemberRecord, sequence: int, now: float) -> None:
        """A member beats: its heartbeat is what it says now."""
        member.sequence, member.received_at = sequence, now
        self.members.move_to_end(key)
        heartbeat = member.heartbeat
        if self.state in OVER:
            if heartbeat.acknowledged or heartbeat.leaving:
                self._uninformed.discard(key)
            else:
                self._uninformed.add(key)
        elif self.state in ACTIVE and heartbeat.worker.generation == self.generation.number and not self._closing:
            self._judge(key, heartbeat, now)

    def _replaced(self, key: Key, known: MemberRecord, heartbeat: Heartbeat, now: float) -> None:
        """A new incarnation. The old supervisor has died, and its worker with it, or it may live on elsewhere."""
        if (self._live(key) or not known.idle) and not same_node(known.heartbeat, heartbeat):
            self._admission.replaced(known)
        self._lose(key, "restarted", f"{name_of(key)} was started again", now)

    def crashed(self, key: Key, now: float) -> None:
        """Whoever started the member `key` has seen its process end. Nobody calls it any more; but its worker may live
        on for a moment, so it counts as stopped as it did before: once it is back, or silent for a lease."""
        self._lose(key, "restarted", f"the process of {name_of(key)} ended", now)

    def _judge(self, key: Key, heartbeat: Heartbeat, now: float) -> None:
        """What a worker of the newest generation does, or how it ended."""
        worker = heartbeat.worker
        if key == self.master:
            self._follow_master(heartbeat, now)
        if worker.state != "ended" or self._finishing:
            return
        if not self._live(key) and not self.generation.was_unreachable(key, heartbeat):
            return
        reason = f"{name_of(key)}: {worker.error}"
        if key == self.master and worker.outcome == "drained":
            self._stop("drained", self.reason or "drained", now)
        elif worker.outcome == "refused":
            self._fail(Verdict(reason, USAGE, final=False), now)
        elif worker.outcome == "lost" and not self._elastic(key):
            self.generation.bereft.setdefault(key, now)  # the peer that it lost reports its own end in a moment
        elif worker.outcome in ERRORS and (cause := self._progress.failed(self.generation.number, reason)):
            self._fail(Verdict(cause, FAILED), now)
        else:
            reason = f"the worker of {name_of(key)} ended: {worker.outcome}"
            self._lose(key, worker.outcome, reason, now, _seen_of(key, worker))

    def _follow_master(self, heartbeat: Heartbeat, now: float) -> None:
        """Rank 0's worker. Its success counts even where its generation was just ended because of another rank."""
        worker = heartbeat.worker
        if worker.state == "ended" and worker.outcome == "finished":
            self._finishing, self.summary = True, worker.summary
        if not self._live(self.master):
            return
        self.generation.connected |= worker.state == "running"
        if worker.step:
            self.events += self._progress.advance(worker.step, now)
        for peer in worker.lost_peers:
            self._lose(peer, "unreachable", f"{name_of(peer)} does not answer {name_of(self.master)}", now)
        self._follow_phase(worker.phase, now)
        if worker.drains_failed > self.generation.drains_failed:
            self.generation.drains_failed = worker.drains_failed
            if self.state == "draining":
                self._train_on(now)

    def _follow_phase(self, phase: str, now: float) -> None:
        """The time that rank 0's worker is in a phase, such as saving, is not counted against a drain."""
        generation, busy = self.generation, self.state == "draining" and phase in AWAITED
        if busy == (generation.busy_since is not None):
            return
        if generation.busy_since is not None:
            generation.excused += now - generation.busy_since
        generation.busy_since = now if busy else None
        self._advance()  # members that are leaving wait as long

    def resumed(self, step: int) -> None:
        """Rank 0's worker starts from the checkpoint of `step`."""
        self._progress.resumed(step)

    # ---- time

    def tick(self, now: float) -> Effect | None:
        """Moves on to `now` (seconds). Returns the effect that is due, to be persisted and then confirmed."""
        self._notice_pause(now)
        while self.members:
            key, member = next(iter(self.members.items()))
            if not now - member.received_at > self.rules.lease:
                break
            self._lose(key, "silent", f"nothing heard from {name_of(key)} for {self.rules.lease:g} s", now)
            del self.members[key]
            self.epoch += 1  # what it must do as no member is another directive
            self._leavers.discard(key)
            self._roster.vacate(key)
        if self._finishing:
            return Effect("done", summary=self.summary)
        if self._verdict:
            return Effect("failed", verdict=self._verdict)
        for key, since in self.generation.bereft.items():
            if now - since >= HOLD:
                self._lose(key, "lost", f"the worker of {name_of(key)} ended: lost", now)
        match self.state:
            case "gathering":
                return self._gather(now)
            case "running":
                self._run(now)
            case "draining":
                self._check_drain(now)
            case "stopping":
                # one that is silent for a lease, and so no member any more, has ended its own worker
                if all(self.members[key].idle for key in self.generation.members if key in self.members):
                    self._enter("gathering", now)
        return None

    def _notice_pause(self, now: float) -> None:
        paused, self._ticked = now - self._ticked, now
        if paused > self.rules.lease / 3:  # this process was suspended: members get one full lease from now on
            self._resumed_at = now
            self.since = min(self.since + paused, now)
            self._progress.slept(paused)
            for member in self.members.values():
                member.received_at = now

    def confirm(self, effect: Effect, now: float) -> None:
        """`effect` is persisted: the generation starts, or the job is over."""
        if effect.kind == "done":
            self._finishing = False
            self._end("finished", now)
            self.events.append(("finished", dict(self.summary)))
            return
        if effect.verdict:
            self._failed(effect.verdict, now)
            return
        members = {key: self.members[key].heartbeat.incarnation for key in effect.members if key in self.members}
        self.number = effect.generation
        self.generation = Generation(effect.generation, members, now)
        self._admission.started(members, now)
        self._enter("running", now)
        self.events.append(("generation", {"number": self.number, "members": text_of(members)}))

    def burn(self, effect: Effect) -> None:
        """`effect` is persisted and due no more: its number is never used."""
        self.number = max(self.number, effect.generation)

    def _gather(self, now: float) -> Effect | None:
        if self._leaving(self.master):
            return None
        missing = self.missing(now)
        late = now - max(self.since, self._progress.pause_until) > self.rules.rejoin_timeout
        if late:
            what = ", ".join(missing) or "the disk to take its number"
            # not for good: they may be there when rank 0 is started again
            self._fail(Verdict(f"waited {self.rules.rejoin_timeout:g} s for {what}", FAILED, final=False), now)
        if late or missing:
            return None
        if failure := self._progress.exhausted():  # by a rank 0 that was killed again and again
            self._fail(failure, now)
            return Effect("failed", verdict=failure)
        return Effect("begin", self.number + 1, tuple(self._admission.chosen(self.members, now)), budget=self.budget)

    def missing(self, now: float) -> list[str]:
        """What a start still waits for, in words."""
        return self._admission.missing(self.members, now - self.since, now) + self._progress.missing(now)

    def _run(self, now: float) -> None:
        leaving: list[Key] = []
        if self._leavers:
            leaving = [key for key in self.generation.keys if key in self._leavers and self._live(key)]
        for key in leaving:
            if self._elastic(key) and self._count(key[0]) > self.roles[key[0]].minimum:
                self._lose(key, "left", f"{name_of(key)} left", now)
        for role in self.roles.values():
            if self.state == "running" and now >= self.generation.hold_until and self._count(role.name) < role.minimum:
                self._stop("lost", f"fewer than {role.minimum} {role.name} left", now, self.generation.last_loss)
        if self.state != "running" or now < self.generation.drain_after:
            return
        if leaving := list(filter(self._live, leaving)):
            self._drain(f"{name_of(leaving[0])} is leaving", now)
        elif now - self.generation.started >= self.rules.rejoin_interval:
            if len(self.members) == sum(self._count(role) for role in self.roles):
                return  # all are in, as nearly always
            others = {key: member for key, member in self.members.items() if not self._live(key)}
            if newcomers := self._admission.newcomers(others, now):
                self._drain(f"taking in {text_of(newcomers)}", now)

    def _check_drain(self, now: float) -> None:
        generation = self.generation
        phases = generation.excused + (0.0 if generation.busy_since is None else now - generation.busy_since)
        if now - self.since <= self.rules.drain_timeout + min(phases, self.rules.phase_timeout):
            return
        if any(self._leaving(key) for key in self.generation.members if not self._elastic(key)):
            self._stop("left", f"{self.reason}; the drain took too long", now)
        else:
            self._train_on(now)

    # ---- questions

    def settled(self, now: float) -> bool:
        """Whether the job is over and every member knows, or had `finish_grace` seconds to learn it.

        After a pause of this process, a member may have been restarted since it acknowledged: it gets a lease, too.
        """
        if self.state not in OVER or now - self._ticked > self.rules.lease / 3:  # a pause that no tick has noticed yet
            return False
        informed = now - self._resumed_at > self.rules.lease and self._uninformed <= {self.master}
        return informed or now - self.since > self.rules.finish_grace

    def counts(self, role: str, now: float) -> tuple[int, int, int]:
        """(members of the running generation, members with a good lease, members that a start waits for) of a role."""
        here = sum(key[0] == role for key in self.members)
        return self._count(role), here, self._admission.wanted(role, now - self.since)


def _seen_of(key: Key, worker: WorkerStatus) -> str:
    """How a worker ended, in words."""
    told = worker.error.splitlines()[0] if worker.error and worker.outcome in ("killed", "crashed", "stuck") else ""
    return f"worker of {name_of(key)} {told or worker.outcome}"
