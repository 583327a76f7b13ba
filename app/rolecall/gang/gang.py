"""The gang: who is in, which generation runs, what each member must do. Pure logic: no I/O, the clock is passed in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec.structs import replace

from rolecall.errors import FAILED, USAGE
from rolecall.gang.admission import Admission
from rolecall.gang.budget import RestartBudget
from rolecall.gang.directives import Epochs, text_of
from rolecall.gang.ending import Ending
from rolecall.gang.generation import Drain, Generation, Part
from rolecall.gang.protocol import (
    ACTIVE,
    DETACHED,
    DRAIN_EXEMPT_PHASES,
    ERRORS,
    MET,
    OVER,
    PEER_REPORT_SECONDS,
    Answer,
    Batch,
    Beat,
    Budget,
    Cause,
    Directive,
    Effect,
    Event,
    GangState,
    Heartbeat,
    Key,
    LostPeer,
    RejectedError,
    RoleSpec,
    Rules,
    SharedSettings,
    Verdict,
    WorkerStatus,
    end_of,
    name_of,
)
from rolecall.gang.requests import Requests
from rolecall.gang.roster import MemberRecord, Roster, same_node


class Gang:
    """The coordinator's state machine. A *generation* is rank 0's worker with the workers that it meets: those of fixed
    roles for as long as it lasts, those of elastic roles from when they join until they leave or are lost.

    | state | event | next state |
    | --- | --- | --- |
    | gathering | `Admission` and `RestartBudget` miss nothing, and the generation's number is on disk | running |
    | gathering | something is missing for `rejoin_timeout` | failed |
    | running | an elastic rank leaves or is lost, its role keeps its minimum, all workers have connected | running |
    | running | a rank of an elastic role that stays is welcome, has loaded a worker, its place is on disk | running |
    | running | a rank that is needed leaves, or one of an elastic role that does not stay is welcome | draining |
    | draining | the drain fails, or takes too long for a newcomer | running |
    | draining | rank 0's worker has drained, or the drain for a fixed rank takes too long | stopping |
    | running, draining | a fixed rank is lost, a role falls below its minimum, a loss before all connected | stopping |
    | stopping | every member is proved to have no worker in it, or was silent for a lease | gathering |
    | any but failed | rank 0's worker finished, and DONE is on disk | finished |
    | any but finished | bad input; or `max_failures` or the restart budget is spent, and FAILED is on disk | failed |

    The driver calls a method for each event, does what the returned `Batch` says, and calls `tick` once the batch's
    deadline has passed. It reports by `written` what became of an effect. One effect is written at a time, and the gang
    goes on meanwhile. If an effect is no longer due when it is on disk, its number is given up.

    Safety rests on three rules. A generation starts only if every worker of the one before is proved to be stopped, or
    to be detached from it, or its member was silent for a lease, by which time the member has done so itself. Only a
    heartbeat sent after the directive proves that, so epochs exceed those of earlier coordinators. Generation numbers,
    and the members of a generation, are on disk before use.

    `incarnation` is that of rank 0's supervisor. `last`, `previous`, `done`, `failed` and `budget` are what an earlier
    coordinator left on disk. Ranks of another `job`, or with other `settings`, are refused. While rank 0 is `checking`
    the settings, members wait, and that time does not count. Times are in seconds.
    """

    def __init__(
        self,
        roles: tuple[RoleSpec, ...],
        rules: Rules,
        incarnation: str,
        now: float,
        *,
        last: int = 0,
        previous: tuple[Key, ...] = (),
        done: dict[str, Any] | None = None,
        failed: Verdict | None = None,
        budget: Budget | None = None,
        job: str = "",
        settings: SharedSettings | None = None,
        checking: bool = False,
    ) -> None:
        self.roles = {role.name: role for role in roles}
        self.rules, self.incarnation = rules, incarnation
        self.rank0: Key = (roles[0].name, 0)
        self.members: OrderedDict[Key, MemberRecord] = OrderedDict()  # the one that is silent for longest comes first
        self.generation = Generation(last, {}, now)
        self.number = last
        self.state: GangState = "failed" if failed else "gathering" if done is None else "finished"
        self.since = now  # when it entered `state`
        self.reason, self.code, self.final = (failed.reason, failed.code, failed.final) if failed else ("", 0, False)
        self.summary = done or {}
        self.requests = Requests(rules, incarnation, self.directive, self._answer)
        self._events: list[Event] = []
        self._roster = Roster(self.roles, self.rank0, incarnation, job, settings or SharedSettings())
        self._admission = Admission(self.roles, rules, last, previous, self._events)
        self._budget = RestartBudget(rules, budget or Budget(), now)
        self._epochs = Epochs()
        self._ending = Ending(rules, roles, previous, now)
        self._leavers = self._roster.leavers
        self._writing: Effect | None = None
        self._ticked = self._tick_at = self._writing_since = now
        self._checking = checking

    # ---- requests

    def receive(self, number: int, beat: Beat, now: float) -> Batch:
        """The request `number` of a member. One that brings a heartbeat makes a tick due."""
        try:
            key = self._take(beat.heartbeat, now) if beat.heartbeat else self._renew(beat, now)
        except RejectedError as error:
            self.requests.refuse(number, error)
            return self._batch()
        self.requests.add(number, key, beat, now)
        return self._batch(now if beat.heartbeat else None)

    def wake(self, key: Key) -> Batch:
        """The member `key` is to be answered now: its driver has a query for it."""
        self.requests.answer(key)
        return self._batch()

    def close(self) -> Batch:
        """Rank 0 ends."""
        self.requests.close()
        return self._batch()

    def _batch(self, tick_at: float | None = None, effect: Effect | None = None, *, settled: bool = False) -> Batch:
        self._tick_at = self._tick_at if tick_at is None else tick_at
        events = tuple(self._events)
        self._events.clear()
        return Batch(self.requests.replies(), effect, events, self._tick_at, settled)

    # ---- heartbeats

    def _renew(self, beat: Beat, now: float) -> Key | None:
        """Takes a beat whose heartbeat holds. Returns its member's key; None if the gang does not have that one."""
        key = self._roster.renewed(beat, self.members)
        if key and beat.sequence > self.members[key].sequence:
            self._hear(key, self.members[key], beat.sequence, now)
        return key

    def _take(self, heartbeat: Heartbeat, now: float) -> Key:
        """Takes a member's heartbeat. Returns the member's key. Raises RejectedError."""
        key = self._roster.place(heartbeat, self.members, self.generation.number if self.state in ACTIVE else None)
        member = self.members.get(key)
        if member and member.heartbeat.incarnation == heartbeat.incarnation:
            if heartbeat.sequence <= member.sequence:
                return key
            self._epochs.exceed(heartbeat.epoch)
            member.heartbeat, member.revision = heartbeat, -1
        else:
            if member:
                self._replace(key, member, heartbeat, now)
            # it counts as stopped after a directive of this gang, whatever it has carried out before
            self._epochs.exceed(heartbeat.epoch)
            self._epochs.newest += 1
            self.members[key] = member = MemberRecord(heartbeat, now, self._epochs.newest, heartbeat.sequence)
        if self._roster.note(key, heartbeat):
            self._epochs.advance()
        self.number = max(self.number, heartbeat.worker.generation, heartbeat.copied)  # used, and lost or not persisted
        self._hear(key, member, heartbeat.sequence, now)
        return key

    def _hear(self, key: Key, member: MemberRecord, sequence: int, now: float) -> None:
        """Renews the lease: the member's heartbeat is what it says now."""
        member.sequence, member.received_at = sequence, now
        self.members.move_to_end(key)
        heartbeat = member.heartbeat
        if self.state in OVER:
            self._ending.hear(key, heartbeat)
        elif self.state in ACTIVE and heartbeat.worker.generation == self.generation.number and not self._ending.effect:
            self._judge(key, heartbeat, now)

    def _replace(self, key: Key, member: MemberRecord, heartbeat: Heartbeat, now: float) -> None:
        """A new incarnation. The old supervisor has died, and its worker with it, or it may live on elsewhere."""
        works = self._live(key) or self._joins(key) or not member.idle
        self._lose(key, "restarted", f"{name_of(key)} was started again", now)
        if works and not same_node(member.heartbeat, heartbeat):
            self._admission.replaced(key, member)

    def crashed(self, key: Key, now: float) -> Batch:
        """The process of the rank `key` has ended. Its worker may outlive it for a moment, so the rank counts as
        stopped only if it is back, or silent for a lease."""
        self._lose(key, "restarted", f"the process of {name_of(key)} ended", now)
        return self._batch(now)

    def _judge(self, key: Key, heartbeat: Heartbeat, now: float) -> None:
        """What a worker of the newest generation does, or how it ended."""
        worker = heartbeat.worker
        if key == self.rank0:
            self._follow_rank0(heartbeat, now)
        if self._ending.finished is not None:
            return
        if part := self._joins(key):
            self._follow_joining(key, part, worker, now)
            return
        mine = self.generation.parts.get(key)
        if mine is None or mine.number != worker.join:
            return  # a worker of an earlier part
        if worker.state != "ended" and not (worker.state == "ready" and worker.outcome == "lost"):
            return  # one that is ready and lost has left by itself, for a lost peer or a silent rank 0
        reports_late = worker.outcome == "stuck" or self.generation.was_unreachable(key, heartbeat)
        if not self._live(key) and not reports_late:
            return
        if key == self.rank0 and worker.outcome == "drained":
            self._stop("drained", self.reason or "drained", now)
        elif worker.outcome == "lost" and not self._elastic(key):
            self.generation.peer_lost_at.setdefault(key, now)  # that peer reports its own end in a moment
        elif not self._fails(key, worker, now):
            ended = f"the worker of {name_of(key)} ended: {worker.outcome}"
            reason = f"{name_of(key)} left the generation: {worker.error}" if worker.state == "ready" else ended
            self._lose(key, worker.outcome, reason, now, end_of(key, worker))

    def _fails(self, key: Key, worker: WorkerStatus, now: float) -> bool:
        """Whether the job fails with the end of this worker."""
        reason = f"{name_of(key)}: {worker.error}"
        if worker.outcome == "refused":
            self._fail(Verdict(reason, USAGE, final=False), now)
        elif worker.outcome in ERRORS and (cause := self._budget.failed(self.generation.number, reason)):
            self._fail(Verdict(cause, FAILED), now)
        else:
            return False
        return True

    def _follow_joining(self, key: Key, part: Part, worker: WorkerStatus, now: float) -> None:
        """The worker of a member that joins."""
        if worker.join != part.number:
            return
        match worker.state:
            case "ready" if part.state == "loading":
                part.state = "ready"
            case "running" | "draining" if part.state == "joining":
                part.state = "met"
            case "ready" if part.state == "joining" and worker.outcome == "lost":
                self._lose(key, "lost", f"{name_of(key)} could not join: {worker.error}", now)
            case "ended" if not self._fails(key, worker, now):
                self._lose(key, worker.outcome, f"the worker of {name_of(key)} ended: {worker.outcome}", now)

    def _follow_rank0(self, heartbeat: Heartbeat, now: float) -> None:
        """Rank 0's worker. Its success counts even if its generation has just ended because of another rank."""
        worker, generation = heartbeat.worker, self.generation
        if worker.state == "ended" and worker.outcome == "finished":
            self._ending.finished = self.summary = worker.summary
        if not self._live(self.rank0):
            return
        generation.connected |= worker.state in MET
        if worker.step:
            self._events += self._budget.advance(worker.step, now)
        for peer in worker.lost_peers:
            self._lose_peer(peer, now)
        busy = self.state == "draining" and worker.phase in DRAIN_EXEMPT_PHASES
        if generation.drain and generation.drain.set_busy(busy, now):
            self._epochs.advance()  # members that are leaving wait as long
        if worker.drains_failed > generation.drains_failed:
            generation.drains_failed = worker.drains_failed
            if self.state == "draining":
                self._abandon_drain(now)

    def _lose_peer(self, peer: LostPeer, now: float) -> None:
        key = peer.join.role, peer.join.ordinal
        part = self.generation.parts.get(key)
        if part is None or part.number != peer.join.number:
            return
        if peer.replace and part.state == "lost" and (member := self.members.get(key)) and not member.ends:
            member.ends = True  # it was given up before
            self._epochs.advance()
        if peer.replace:
            self._lose(key, "replaced", f"{name_of(self.rank0)} wants another worker of {name_of(key)}", now)
        else:
            self._lose(key, "unreachable", f"{name_of(key)} does not answer {name_of(self.rank0)}", now)

    def resumed(self, step: int) -> None:
        """Rank 0's worker starts from the checkpoint of `step`."""
        self._budget.resumed(step)

    # ---- time and the disk

    def checked(self, now: float) -> Batch:
        """Rank 0 has checked the settings."""
        self._checking = False
        return self._batch(now)

    def tick(self, now: float) -> Batch:
        """Moves on to `now`. A job is over even if DONE or FAILED is not on disk within `rejoin_timeout`."""
        effect, due, writing = None, None if self._checking else self._advance(now), self._writing
        if self._writing is None and due is not None:
            effect, self._writing, self._writing_since = due, due, now
        elif writing and writing.kind in ("done", "failed") and now - self._writing_since > self.rules.rejoin_timeout:
            self._writing = None
            if writing == due:
                self._confirm(writing, now)
        self.requests.tick(self._epochs.revision, now)
        settled = self.state in OVER and self._ending.settled(self.since, now)
        return self._batch(now + self.rules.tick, effect, settled=settled)

    def written(self, on_disk: bool, now: float) -> Batch:
        """The effect is on disk, or could not be put there. A generation whose number is not on disk does not start,
        since its number could be used twice: the next tick tries again. A job that is over is over even so."""
        effect, self._writing = self._writing, None
        if effect is None:
            return self._batch()  # it took longer than `rejoin_timeout`
        if self._advance(now) != effect:
            if on_disk:
                self.number = max(self.number, effect.generation)  # given up
        elif on_disk or effect.kind not in ("begin", "join"):
            self._confirm(effect, now)
        return self._batch(now if on_disk else None)

    def _advance(self, now: float) -> Effect | None:
        """Moves on to `now`. Returns the effect that is due."""
        self._notice_pause(now)
        self._expire(now)
        if self._ending.effect:
            return self._ending.effect
        for key, since in self.generation.peer_lost_at.items():
            if now - since >= PEER_REPORT_SECONDS:
                self._lose(key, "lost", f"the worker of {name_of(key)} ended: lost", now)
        match self.state:
            case "gathering":
                return self._gather(now)
            case "running":
                self._run(now)
                return self._join(now) if self.state == "running" else None
            case "draining":
                self._check_drain(now)
            case "stopping":
                if all(map(self._has_stopped, self.generation.parts)):
                    self._enter("gathering", now)
        return None

    def _expire(self, now: float) -> None:
        while self.members:
            key, member = next(iter(self.members.items()))
            if not now - member.received_at > self.rules.lease:
                break
            self._lose(key, "silent", f"nothing heard from {name_of(key)} for {self.rules.lease:g} s", now)
            del self.members[key]
            self._roster.vacate(key, member.heartbeat)
            self._epochs.advance()  # what it must do as no member is another directive

    def _notice_pause(self, now: float) -> None:
        paused, self._ticked = now - self._ticked, now
        if paused > self.rules.lease / 3:  # this process was suspended: members get one full lease from now on
            self._ending.resumed(now)
            for member in self.members.values():
                member.received_at = now
        elif not self._roster.debugged:
            return
        self.since = min(self.since + paused, now)
        self._budget.slept(paused)

    def _confirm(self, effect: Effect, now: float) -> None:
        """The generation starts, or the job is over."""
        if effect.kind == "done":
            self._end("finished", now)
            self._events.append(Event("finished", summary=self.summary))
        elif effect.kind == "join":
            self.generation.begin_joining(effect.members)
            self._epochs.advance()
        elif effect.verdict:
            self._end_failed(effect.verdict, now)
        else:
            members = {key: self.members[key].heartbeat.incarnation for key in effect.members if key in self.members}
            self.number = effect.generation
            self.generation = Generation(effect.generation, members, now)
            self._admission.started(members, now)
            for key in members:
                self.members[key].ends = False
            self._enter("running", now)
            stayed = sum(self.members[key].heartbeat.worker.state in DETACHED for key in members)
            self._events.append(Event("generation", number=self.number, members=text_of(members), stayed=stayed))

    def _gather(self, now: float) -> Effect | None:
        if self.rank0 in self._leavers:
            return None
        missing = self.missing(now)
        late = now - max(self.since, self._budget.pause_until) > self.rules.rejoin_timeout
        if late:
            what = ", ".join(missing) or "the disk to take its number"
            # not for good: they may be there when rank 0 is started again
            self._fail(Verdict(f"waited {self.rules.rejoin_timeout:g} s for {what}", FAILED, final=False), now)
        else:
            self._admission.tell(missing, self.since, now)
        if late or missing:
            return None
        if verdict := self._budget.exhausted():  # by a rank 0 that was killed again and again
            self._fail(verdict, now)
            return self._ending.effect
        return Effect("begin", self.number + 1, tuple(self._admission.chosen(self.members, now)), budget=self.budget)

    def _run(self, now: float) -> None:
        generation = self.generation
        for key in [key for key in self._leavers if self._joins(key)]:
            self._lose(key, "left", f"{name_of(key)} left", now)
        leaving = [key for key in generation.keys if key in self._leavers and self._live(key)] if self._leavers else []
        for key in leaving:
            if self._elastic(key) and self._count(key[0]) > self.roles[key[0]].minimum:
                self._lose(key, "left", f"{name_of(key)} left", now)
        for role in self.roles.values():
            if self.state == "running" and now >= generation.hold_until and self._count(role.name) < role.minimum:
                self._stop("lost", f"fewer than {role.minimum} {role.name} left", now, generation.last_loss)
        if self.state != "running" or now < generation.drain_after:
            return
        if leaving := list(filter(self._live, leaving)):
            self._drain(f"{name_of(leaving[0])} is leaving", now)
            return
        if len(self.members) == sum(self._count(role) for role in self.roles):
            return  # all are in, as nearly always
        others = {key: member for key, member in self.members.items() if not self._live(key) and not self._joins(key)}
        newcomers = self._admission.newcomers(others, now)
        for key in newcomers:
            if self._stays(key) and generation.connected:
                others[key].ends = False
                generation.begin_loading(key, others[key].heartbeat.incarnation, now)
                self._epochs.advance()
        newcomers = [key for key in newcomers if not self._stays(key)]
        if newcomers and now - generation.started >= self.rules.rejoin_interval:
            self._drain(f"taking in {text_of(newcomers)}", now)

    def _join(self, now: float) -> Effect | None:
        """Those that have joined are in, and those that are ready may join: in batches, since each member learns of
        them. Returns the effect that puts the places of the latter on disk, without those that have left in order."""
        joined = self.generation.join(now, self.budget, self._has_stopped)
        if joined:
            self._admission.joined(joined, now)
            self._epochs.advance()
            waits = tuple(round(seconds, 3) for seconds in joined.values())
            self._events.append(Event("joined", members=text_of(joined), seconds=max(waits), joins=waits))
        return self.generation.batch

    def _check_drain(self, now: float) -> None:
        drain = self.generation.drain
        excused = min(drain.excused_until(now), self.rules.phase_timeout) if drain else 0.0
        if now - self.since <= self.rules.drain_timeout + excused:
            return
        if any(key in self._leavers for key in self.generation.members if not self._elastic(key)):
            self._stop("left", f"{self.reason}; the drain took too long", now)
        else:
            self._abandon_drain(now)

    # ---- transitions

    def _enter(self, state: GangState, now: float) -> None:
        self.state, self.since = state, now
        self._epochs.advance()

    def _drain(self, reason: str, now: float) -> None:
        self.reason, self.generation.drain = reason, Drain()
        self._enter("draining", now)
        self._events.append(Event("draining", reason=reason))

    def _abandon_drain(self, now: float) -> None:
        """The next try comes after another interval."""
        self.generation.drain, self.generation.drain_after = None, now + self.rules.rejoin_interval
        self._enter("running", now)
        self._events.append(Event("drain given up", reason=self.reason))

    def _lose(self, key: Key, cause: Cause, reason: str, now: float, end: str = "") -> None:
        """A worker has ended, or its member is given up. The generation ends, or goes on without an elastic rank.
        `end` says how the worker ended, for the budget."""
        if self._ending.effect:
            return
        joins = self._joins(key) is not None
        if not joins and not self._live(key):
            return
        orderly = ("left",) if joins else ("left", "lost", "replaced")
        if self._elastic(key) and cause not in orderly and (verdict := self._admission.died(key, end or reason, now)):
            self._fail(verdict, now)
            return
        if not joins and (not self._elastic(key) or not self.generation.connected):
            self._stop(cause, reason, now, end)
            return
        self.generation.lose(key, cause, end or reason)
        self.members[key].ends = cause == "replaced"
        if cause == "lost" and not joins:  # it lost a peer, which reports its own end in a moment
            self.generation.hold_until = now + PEER_REPORT_SECONDS
        self._epochs.advance()
        self.members[key].stop_epoch = self._epochs.newest
        self._events.append(Event("lost", cause=cause, reason=reason))

    def _stop(self, cause: Cause, reason: str, now: float, end: str = "") -> None:
        """Ends the generation; or the job, if that is one generation without progress too many."""
        if verdict := self._budget.ended(cause, end or reason, now):
            self._fail(verdict, now)
            return
        self.reason = reason
        working = [self.members[key] for key in self.generation.parts if self._live(key) or self._joins(key)]
        self._enter("stopping", now)
        for member in working:  # an earlier heartbeat without a worker may be older than its worker
            member.stop_epoch = self._epochs.newest
        self._events.append(Event("stopped", cause=cause, reason=reason))

    def _fail(self, verdict: Verdict, now: float) -> None:
        """The job fails: at once, or, if the verdict is final, as soon as it is on disk."""
        if verdict.final:
            self._ending.verdict = verdict
        else:
            self._end_failed(verdict, now)

    def _end_failed(self, verdict: Verdict, now: float) -> None:
        self.reason, self.code, self.final = verdict.reason, verdict.code, verdict.final
        self._end("failed", now)
        self._events.append(Event("failed", reason=verdict.reason))

    def _end(self, state: GangState, now: float) -> None:
        """The job is over. Members that are away for a moment must learn so too."""
        away = () if self.state == "gathering" else self.generation.keys
        keys, causes = (*self.members, *away), self.generation.causes
        self._ending.begin([key for key in keys if key not in self._leavers and causes.get(key) != "left"])
        self._enter(state, now)

    # ---- directives out

    def directive(self, key: Key) -> Directive:
        """What the member `key` must do now."""
        if (member := self.members.get(key)) is None:
            return self._order(key)
        if member.directive is not None and member.revision == self._epochs.revision:
            return member.directive
        return self._epochs.give(member, self._order(key))

    def _order(self, key: Key) -> Directive:
        role, ordinal, epoch, begun = *key, self._epochs.newest, self.generation.number
        if self.state == "finished" or self.state == "failed":
            over, reason = self.state, self.reason
            return Directive(over, ordinal, epoch, role=role, reason=reason, code=self.code, final=self.final)
        if self._live(key) or self._joins(key):
            order = self.generation.order(key, epoch, self._stays(key), paused=bool(self._roster.debugged))
            drain = self.generation.drain if self.state == "draining" else None
            if drain and key == self.rank0:
                return replace(order, drain=True, reason=self.reason)
            # only a member that is leaving would give the drain up
            return replace(order, busy=True) if drain and drain.busy and key in self._leavers else order
        # rank 0 leaves last: the others learn from it that they may
        if key in self._leavers and self.members[key].idle and (key != self.rank0 or self.state == "gathering"):
            return Directive("leave", ordinal, epoch, role=role, reason="left")
        member = self.members.get(key)
        keeps = self._stays(key) and not (member and member.ends)
        return Directive("detach" if keeps else "stop", ordinal, epoch, role=role, reason=self.reason, begun=begun)

    def _answer(self, beat: Beat, directive: Directive) -> Answer:
        return self.generation.answer(self.incarnation, beat, directive)

    # ---- questions

    def missing(self, now: float) -> list[str]:
        """What a start still waits for, in words."""
        return self._admission.missing(self.members, now - self.since, now) + self._budget.missing(now)

    def counts(self, role: str, now: float) -> tuple[int, int, int]:
        """(members of the running generation, members with a good lease, members that a start waits for) of a role."""
        registered = sum(key[0] == role for key in self.members)
        return self._count(role), registered, self._admission.wanted(role, now - self.since)

    @property
    def joining(self) -> frozenset[Key]:
        """The members that load a worker to join the running generation, or meet the others."""
        return frozenset(filter(self._joins, self.generation.parts))

    @property
    def budget(self) -> Budget:
        """What has been spent without progress, to be kept on disk."""
        return self._budget.spent

    def _live(self, key: Key) -> bool:
        """Whether `key`, in its present incarnation, is part of a generation that runs."""
        return self.state in ("running", "draining") and self.generation.has(key, self.members.get(key))

    def _joins(self, key: Key) -> Part | None:
        """The part of `key`, in its present incarnation, if it joins a generation that runs."""
        if self.state not in ("running", "draining"):
            return None
        return self.generation.pending(key, self.members.get(key))

    def _has_stopped(self, key: Key) -> bool:
        """Whether `key` has no worker: one that was silent for a lease, and so is no member, has ended it."""
        return key not in self.members or self.members[key].idle

    def _stays(self, key: Key) -> bool:
        return self.roles[key[0]].stays and key != self.rank0

    def _elastic(self, key: Key) -> bool:
        return self.roles[key[0]].elastic

    def _count(self, role: str) -> int:
        return self.generation.count(role) if self.state in ("running", "draining") else 0
