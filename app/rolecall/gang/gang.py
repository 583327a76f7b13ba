"""The gang: who is in, which generation runs, what each member is to do. Pure logic: no I/O, the clock is passed in.

A *generation* is a fixed set of members, each with a fresh worker. Members `beat` with a `Report`; `order` says what a
member is to do; `tick` moves time on and returns the one thing that must reach the disk before the gang goes on (a new
generation's number, or DONE), which the caller confirms with `confirm`.

Safety rests on three rules. A generation starts only when every worker of the one before is known to be stopped, or its
member has been silent for a whole lease (a member that gets no answer for that long ends its own worker). A member is
known to be stopped only by a report made after it had carried out an order to stop, which is why orders are numbered by
epochs: they grow past those of earlier coordinators too, whose members come back with them. Generation numbers are
persisted before use.
"""

from __future__ import annotations

from typing import Any

from rolecall.gang.admission import Admission, Progress
from rolecall.gang.protocol import ERRORS, FAILED, HOLD, USAGE, Effect, Key, Order, Report, Role, Rules, name_of
from rolecall.gang.roster import Generation, Member, Roster, same_node

ACTIVE = ("running", "draining", "stopping")
OVER = ("finished", "failed")


class Gang:
    """The coordinator's mind. `incarnation` is rank 0's own: nobody else can be rank 0.
    `last`, `previous`: the last generation's number and members, as persisted; `done`: DONE's summary, if there is one.
    """

    def __init__(
        self,
        roles: tuple[Role, ...],
        rules: Rules,
        incarnation: str,
        now: float,
        last: int = 0,
        previous: tuple[Key, ...] = (),
        done: dict[str, Any] | None = None,
    ) -> None:
        self.roles = {role.name: role for role in roles}
        self.rules = rules
        self.master: Key = (roles[0].name, 0)
        self.members: dict[Key, Member] = {}
        self.generation = Generation(last, {}, now)
        self.state = "gathering" if done is None else "finished"
        self.number = last
        self.epoch = 1
        self.since = now
        self.reason = ""
        self.code = 0
        self.summary = done or {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._roster = Roster(self.roles, self.master, incarnation)
        self._admission = Admission(self.roles, rules, last, previous)
        self._progress = Progress(rules.max_failures)
        self._unheard = set[Key]() if done is None else {(role.name, n) for role in roles for n in range(role.count)}
        self._ticked = now
        self._finishing = False

    # ---- events in

    def beat(self, report: Report, now: float) -> Key:
        """Take a member's report. Raises RejectedError. Returns the member's key."""
        key = self._roster.place(report, self.members)
        known = self.members.get(key)
        if known and known.report.incarnation == report.incarnation:
            if report.beat <= known.report.beat:
                return key
            self.epoch = max(self.epoch, report.epoch)
            self.members[key] = Member(report, now, known.told)
        else:
            if known:
                self._replaced(key, known, report, now)
            self.epoch = max(self.epoch, report.epoch + 1)  # what it says counts when it has heard from this gang
            self.members[key] = Member(report, now, self.epoch)
        self.number = max(self.number, report.generation)  # a number that was used and could not be persisted
        if self.state in OVER:
            self._unheard = self._unheard - {key} if report.heard or report.leaving else self._unheard | {key}
        elif self.state in ACTIVE and report.generation == self.generation.number and not self._finishing:
            self._judge(key, report, now)
        return key

    def _replaced(self, key: Key, known: Member, report: Report, now: float) -> None:
        """A new incarnation. The old one's supervisor has died, and its worker with it, or it may live on elsewhere."""
        if (self._live(key) or not known.idle) and not same_node(known.report, report):
            self._admission.replaced(known)
        self.epoch += 1  # who still waits for an answer in the old one's place hears of it before the new one works
        self._gone(key, "restarted", f"{name_of(key)} was started again", now)

    def _judge(self, key: Key, report: Report, now: float) -> None:
        """What a worker of the newest generation does, or how it ended."""
        if key == self.master:
            self._hear_first(report, now)
        if report.state != "ended" or self._finishing or not (self._live(key) or self.generation.gave_up(key, report)):
            return
        reason = f"{name_of(key)}: {report.error}"
        if key == self.master and report.outcome == "drained":
            self._stop("drained", self.reason or "drained", now)
        elif report.outcome == "refused":
            self._fail(reason, USAGE, now)
        elif report.outcome in ERRORS and (cause := self._progress.failed(self.generation.number, reason)):
            self._fail(cause, FAILED, now)
        else:
            self._gone(key, report.outcome, f"the worker of {name_of(key)} ended: {report.outcome}", now)

    def _hear_first(self, report: Report, now: float) -> None:
        """Rank 0's worker. Its success counts even where its generation was just ended for another's sake."""
        if report.state == "ended" and report.outcome == "finished":
            self._finishing, self.summary = True, report.summary
        if not self._live(self.master):
            return
        self.generation.connected |= report.state == "running"
        if report.step:
            self.events += self._progress.made(report.step, now)
        for peer in report.gave_up:
            self._gone(peer, "unreachable", f"{name_of(peer)} does not answer {name_of(self.master)}", now)
        if report.drains_failed > self.generation.drains_failed:
            self.generation.drains_failed = report.drains_failed
            if self.state == "draining":
                self._train_on(now)

    # ---- time

    def tick(self, now: float) -> Effect | None:
        """Move on to `now`; the effect that is due, to be made and then confirmed."""
        self._notice_pause(now)
        for key, member in list(self.members.items()):
            if now - member.heard_at > self.rules.lease:
                self._gone(key, "silent", f"nothing heard from {name_of(key)} for {self.rules.lease:g} s", now)
                del self.members[key]
        if self._finishing:
            return Effect("done", summary=self.summary)
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
        if paused > self.rules.lease / 3:  # it was us who slept: one full lease before anyone is judged
            self.since = min(self.since + paused, now)
            for member in self.members.values():
                member.heard_at = now

    def confirm(self, effect: Effect, now: float) -> None:
        """`effect` is on disk."""
        if effect.kind == "done":
            self._finishing = False
            self._end("finished", now)
            self.events.append(("finished", dict(self.summary)))
            return
        members = {key: self.members[key].report.incarnation for key in effect.members if key in self.members}
        self.number = effect.generation
        self.generation = Generation(effect.generation, members, now)
        self._admission.started(members, now)
        self._enter("running", now)
        self.events.append(("generation", {"number": self.number, "members": [name_of(key) for key in members]}))

    def _gather(self, now: float) -> Effect | None:
        if self._leaving(self.master):
            return None
        missing, late = self.missing(now), now - self.since > self.rules.rejoin_timeout
        if late:
            what = ", ".join(missing) or "the disk to take its number"
            self._fail(f"waited {self.rules.rejoin_timeout:g} s for {what}", FAILED, now)
        begin = Effect("begin", self.number + 1, tuple(self._admission.chosen(self.members, now)))
        return None if late or missing else begin

    def missing(self, now: float) -> list[str]:
        """What a start still waits for, in words."""
        return self._admission.missing(self.members, now - self.since, now)

    def _run(self, now: float) -> None:
        leaving = [key for key in self.generation.members if self._live(key) and self._leaving(key)]
        for key in leaving:
            if self._elastic(key) and self._count(key[0]) > self.roles[key[0]].minimum:
                self._gone(key, "left", f"{name_of(key)} left", now)
        for role in self.roles.values():
            if self.state == "running" and now >= self.generation.hold_until and self._count(role.name) < role.minimum:
                self._stop("lost", f"fewer than {role.minimum} {role.name} left", now)
        if self.state != "running" or now < self.generation.drain_after:
            return
        if leaving := list(filter(self._live, leaving)):
            self._drain(f"{name_of(leaving[0])} is leaving", now)
        elif now - self.generation.started >= self.rules.rejoin_interval:
            others = {key: member for key, member in self.members.items() if not self._live(key)}
            if newcomers := self._admission.newcomers(others, now):
                self._drain("taking in " + ", ".join(map(name_of, newcomers)), now)

    def _check_drain(self, now: float) -> None:
        if now - self.since <= self.rules.drain_timeout:
            return
        if any(self._leaving(key) for key in self.generation.members if not self._elastic(key)):
            self._stop("left", f"{self.reason}; the drain took too long", now)
        else:
            self._train_on(now)

    # ---- transitions

    def _enter(self, state: str, now: float) -> None:
        self.state, self.since = state, now
        self.epoch += 1

    def _drain(self, reason: str, now: float) -> None:
        self.reason = reason
        self._enter("draining", now)
        self.events.append(("draining", {"reason": reason}))

    def _train_on(self, now: float) -> None:
        """Give the drain up; the next try comes after another interval."""
        self.generation.drain_after = now + self.rules.rejoin_interval
        self._enter("running", now)
        self.events.append(("drain given up", {"reason": self.reason}))

    def _stop(self, cause: str, reason: str, now: float) -> None:
        self.reason = reason
        self._progress.broke(now)
        working = [member for key, member in self.members.items() if self._live(key)]
        self._enter("stopping", now)
        for member in working:
            member.told = self.epoch  # what it said before of having no worker may be older than its worker
        self.events.append(("stopped", {"cause": cause, "reason": reason}))

    def _fail(self, reason: str, code: int, now: float) -> None:
        self.reason, self.code = reason, code
        self._end("failed", now)
        self.events.append(("failed", {"reason": reason}))

    def _end(self, state: str, now: float) -> None:
        """The job is over. Whoever is away for a moment is to hear so too."""
        away = () if self.state == "gathering" else self.generation.members
        keys, lost = (*self.members, *away), self.generation.lost
        self._unheard = {key for key in keys if not self._leaving(key) and lost.get(key) != "left"}
        self._enter(state, now)

    def _gone(self, key: Key, cause: str, reason: str, now: float) -> None:
        """A member's worker is no more, or given up: the generation ends, or goes on without an elastic one."""
        if not self._live(key) or self._finishing:
            return
        if self._elastic(key) and cause not in ("left", "lost"):
            self._admission.died(key, now)
        if not self._elastic(key) or not self.generation.connected:
            self._stop(cause, reason, now)
            return
        self.generation.lost[key] = cause
        if cause == "lost":  # of a peer: who that was will be heard in a moment
            self.generation.hold_until = now + HOLD
        self.epoch += 1
        self.members[key].told = self.epoch
        self.events.append(("lost", {"cause": cause, "reason": reason}))

    # ---- orders out

    def order(self, key: Key) -> Order:
        """What the member `key` is to do now."""
        ordinal, epoch = key[1], self.epoch
        if self.state in OVER:
            return Order(self.state, ordinal, epoch, reason=self.reason, code=self.code)
        if self._live(key):
            generation, drain = self.generation, self.state == "draining" and key == self.master
            members, lost = tuple(generation.members), tuple(sorted(generation.lost))
            return Order("run", ordinal, epoch, generation.number, members, lost, drain, self.reason)
        # rank 0 leaves last: the others hear from it that they may
        if self._leaving(key) and self.members[key].idle and (key != self.master or self.state == "gathering"):
            return Order("leave", ordinal, epoch, reason="left")
        return Order("stop", ordinal, epoch, reason=self.reason)

    def settled(self, now: float) -> bool:
        """The job is over and every member has heard so, or had the time to."""
        return self.state in OVER and (self._unheard <= {self.master} or now - self.since > self.rules.finish_grace)

    def counts(self, role: str, now: float) -> tuple[int, int, int]:
        """(members of the running generation, members with a good lease, members that a start waits for) of a role."""
        here = sum(key[0] == role for key in self.members)
        return self._count(role), here, self._admission.wanted(role, now - self.since)

    # ---- questions

    def _live(self, key: Key) -> bool:
        """Whether `key`, in its present incarnation, is part of a generation that runs."""
        return self.state in ("running", "draining") and self.generation.has(key, self.members.get(key))

    def _elastic(self, key: Key) -> bool:
        return self.roles[key[0]].elastic

    def _leaving(self, key: Key) -> bool:
        return key in self.members and self.members[key].leaving

    def _count(self, role: str) -> int:
        return sum(key[0] == role and self._live(key) for key in self.generation.members)
