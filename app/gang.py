"""The gang: who is in, which generation runs, what each member is to do. Pure logic: no I/O, the clock is passed in.

A *generation* is a fixed set of members, each with a fresh worker. Members `beat` with a `Report`; `order` says what a
member is to do; `tick` moves time on and returns the one thing that must reach the disk before the gang goes on (a new
generation's number, or DONE), which the caller confirms with `confirm`.

Safety rests on three rules. A generation starts only when every worker of the one before is known to be stopped, or its
member has been silent for a whole lease (a member that gets no answer for that long ends its own worker). A member is
known to be stopped only by a report made after it had read the order to stop. Numbers are persisted before use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.config import FAILED, USAGE
from app.protocol import ALIVE, ERRORS, MAX_BACKOFF, Effect, Key, Order, Report, Role, Rules, name_of
from app.roster import Member, Roster


@dataclass
class Generation:
    number: int
    members: dict[Key, str]  # in order of rank, with the incarnation that is meant
    started: float
    lost: set[Key] = field(default_factory=set)


class Gang:
    """The coordinator's mind. `incarnation` is rank 0's own: nobody else can be rank 0.

    `last` and `previous` are the last generation's number and members, as persisted; `done` is DONE's summary where the
    job has finished already.
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
        self._roster = Roster(self.roles, self.master, incarnation)
        self.members: dict[Key, Member] = {}
        self.generation: Generation | None = None
        self.state = "gathering" if done is None else "finished"
        self.number = last
        self.epoch = 1
        self.since = now
        self.reason = ""
        self.code = 0
        self.summary = done or {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._previous = set(previous)
        self._wanted = self._first_want(previous)
        self._expected = None if done is None else sum(role.count for role in roles)
        self._youth: dict[Key, tuple[int, float]] = {}
        self._last_tick = now
        self._failures: list[str] = []
        self._progress = 0
        self._broken_at: float | None = None
        self._finishing = False
        self._drains_failed = 0

    def _first_want(self, previous: tuple[Key, ...]) -> dict[str, int]:
        want = {}
        for role in self.roles.values():
            before = sum(key[0] == role.name for key in previous)
            want[role.name] = before if role.elastic and before else role.count
        return want

    # ---- events in

    def beat(self, report: Report, now: float) -> Key:
        """Take a member's report. Raises RejectedError. Returns the member's key."""
        key = self._roster.place(report, self.members)
        known = self.members.get(key)
        if known and known.report.incarnation == report.incarnation:
            if report.beat <= known.report.beat:
                return key
        elif known:
            self._roster.retire(known.report.incarnation)
            self._gone(key, "restarted", f"{name_of(key)} was started again", now)
        self.members[key] = Member(report, now)
        self._judge(key, report, now)
        return key

    def _judge(self, key: Key, report: Report, now: float) -> None:
        generation = self.generation
        if not self._live(key) or generation is None or report.generation != generation.number:
            return
        if key == self.master:
            if report.step > self._progress or (self._broken_at is not None and report.step and report.state in ALIVE):
                self._progressed(report.step, now)
            for peer in report.gave_up:
                self._gone(peer, "unreachable", f"{name_of(peer)} does not answer {name_of(key)}", now)
            if report.drains_failed > self._drains_failed:
                self._drains_failed = report.drains_failed
                if self.state == "draining":
                    self._train_on(now)
        if report.state != "ended" or self._finishing:
            return
        if key == self.master and report.outcome == "finished":
            self._finishing = True
            self.summary = report.summary
            self._progressed(report.step, now)
        elif key == self.master and report.outcome == "drained":
            self._progressed(report.step, now)
            self._stop("drained", self.reason or "drained", now)
        elif report.outcome == "refused":
            self._fail(f"{name_of(key)}: {report.error}", USAGE, now)
        else:
            if report.outcome in ERRORS:
                self._failures.append(f"{name_of(key)}: {report.error}")
                if len(self._failures) >= self.rules.max_failures:
                    self._fail(self._failures[0], FAILED, now)
                    return
            self._gone(key, report.outcome, f"the worker of {name_of(key)} ended: {report.outcome}", now)

    def _progressed(self, step: int, now: float) -> None:
        if step > self._progress:
            self._failures.clear()
        self._progress = max(self._progress, step)
        if self._broken_at is not None:
            self.events.append(("recovered", {"seconds": now - self._broken_at}))
            self._broken_at = None

    # ---- time

    def tick(self, now: float) -> Effect | None:
        """Move on to `now`; the effect that is due, to be made and then confirmed."""
        if now - self._last_tick > self.rules.lease / 3:
            for member in self.members.values():  # it was us who slept: one full lease before anyone is judged
                member.heard_at = now
        self._last_tick = now
        for key, member in list(self.members.items()):
            if now - member.heard_at > self.rules.lease:
                del self.members[key]
                self._gone(key, "silent", f"nothing heard from {name_of(key)} for {self.rules.lease:g} s", now)
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
                if self.generation is None or all(map(self._stopped, self.generation.members)):
                    self._enter("gathering", now)
        return None

    def confirm(self, effect: Effect, now: float) -> None:
        """`effect` is on disk."""
        if effect.kind == "done":
            self._finishing = False
            self._enter("finished", now)
            self.events.append(("finished", dict(self.summary)))
            return
        members = {key: self.members[key].report.incarnation for key in effect.members if key in self.members}
        self.number = effect.generation
        self.generation = Generation(effect.generation, members, now)
        self._previous = set()
        self._wanted = {role.name: role.minimum for role in self.roles.values()}
        self._drains_failed = 0
        self._enter("running", now)
        self.events.append(("generation", {"number": self.number, "members": [name_of(key) for key in members]}))

    def _gather(self, now: float) -> Effect | None:
        if self._leaving(self.master):
            return None
        if self.missing(now):
            if now - self.since > self.rules.rejoin_timeout:
                self._fail(f"waited {self.rules.rejoin_timeout:g} s for {', '.join(self.missing(now))}", FAILED, now)
            return None
        chosen = self._chosen(now)
        return Effect("begin", self.number + 1, tuple(chosen))

    def missing(self, now: float) -> list[str]:
        """What a start still waits for, in words."""
        waiting = []
        waited = now - self.since
        for role in self.roles.values():
            have = sum(key[0] == role.name for key in self._chosen(now))
            want = max(role.minimum, self._wanted[role.name])
            if role.elastic and waited >= self.rules.join_grace:
                want = role.minimum
            if have < want:
                waiting.append(f"{role.name} ({have} of {want} in)")
        waiting += [
            f"the old worker of {name_of(key)} to stop"
            for key, member in self.members.items()
            if member.report.state in ALIVE
        ]
        if waited < self.rules.lease:
            waiting += [f"{name_of(key)}, in the last generation" for key in sorted(self._previous - set(self.members))]
        return waiting

    def _chosen(self, now: float) -> list[Key]:
        """The members of a generation that would start now, in order of rank."""
        chosen = []
        for role in self.roles.values():
            here = sorted(key for key in self.members if key[0] == role.name and not self._leaving(key))
            settled = [key for key in here if self._youth.get(key, (0, 0.0))[1] <= now]
            chosen += settled if role.elastic and len(settled) >= role.minimum else here
        return chosen

    def _run(self, now: float) -> None:
        assert self.generation is not None
        live = [key for key in self.generation.members if self._live(key)]
        for key in live:
            if not self._leaving(key):
                continue
            if self._fixed(key) or self._count(key[0]) <= self.roles[key[0]].minimum:
                self._drain(f"{name_of(key)} is leaving", now)
                return
            self._gone(key, "left", f"{name_of(key)} left", now)
        for role in self.roles.values():
            if self._count(role.name) < role.minimum:
                self._stop("lost", f"fewer than {role.minimum} {role.name} left", now)
                return
        newcomers = [
            key
            for key, member in self.members.items()
            if not self._live(key) and member.report.state not in ALIVE and not self._leaving(key)
            if self._youth.get(key, (0, 0.0))[1] <= now
        ]
        if newcomers and now - self.generation.started >= self.rules.rejoin_interval:
            self._drain("taking in " + ", ".join(map(name_of, sorted(newcomers))), now)

    def _check_drain(self, now: float) -> None:
        assert self.generation is not None
        if now - self.since <= self.rules.drain_timeout:
            return
        if any(self._leaving(key) for key in self.generation.members if self._fixed(key)):
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
        assert self.generation is not None
        self.generation.started = now
        self._enter("running", now)
        self.events.append(("drain given up", {"reason": self.reason}))

    def _stop(self, cause: str, reason: str, now: float) -> None:
        self.reason = reason
        self._broken_at = now
        self._enter("stopping", now)
        self.events.append(("stopped", {"cause": cause, "reason": reason}))

    def _fail(self, reason: str, code: int, now: float) -> None:
        self.reason, self.code = reason, code
        self._enter("failed", now)
        self.events.append(("failed", {"reason": reason}))

    def _gone(self, key: Key, cause: str, reason: str, now: float) -> None:
        """A member's worker is no more, or given up: the generation ends, or goes on without an elastic one."""
        if not self._live(key) or self._finishing:
            return
        assert self.generation is not None
        if self._fixed(key):
            self._stop(cause, reason, now)
            return
        self.generation.lost.add(key)
        if cause != "left":
            deaths = self._youth.get(key, (0, 0.0))[0] + 1 if now - self.generation.started < self.rules.young else 0
            wait = min(self.rules.rejoin_interval * 2 ** min(deaths - 1, 10), MAX_BACKOFF) if deaths > 1 else 0.0
            self._youth[key] = (deaths, now + wait)
        self.epoch += 1
        self.events.append(("lost", {"cause": cause, "reason": reason}))

    # ---- orders out

    def order(self, key: Key) -> Order:
        """What the member `key` is to do now."""
        ordinal, epoch = key[1], self.epoch
        if self.state in ("finished", "failed"):
            return Order(self.state, ordinal, epoch, reason=self.reason, code=self.code)
        if self._live(key):
            assert self.generation is not None
            lost = tuple(sorted(self.generation.lost))
            drain = self.state == "draining" and key == self.master
            members = tuple(self.generation.members)
            return Order("run", ordinal, epoch, self.generation.number, members, lost, drain, self.reason)
        part = self.state in ("running", "draining", "stopping") and self._member_of_generation(key)
        if self._leaving(key) and (not part or self._stopped(key)):
            return Order("leave", ordinal, epoch, reason="left")
        return Order("stop", ordinal, epoch, reason=self.reason)

    def settled(self, now: float) -> bool:
        """The job is over and every member has heard so, or had the time to."""
        if self.state not in ("finished", "failed"):
            return False
        heard = sum(member.report.heard for key, member in self.members.items() if key != self.master)
        others = len(self.members) - (self.master in self.members)
        all_heard = heard == others and (self._expected is None or heard >= self._expected - 1)
        return all_heard or now - self.since > self.rules.finish_grace

    def counts(self, role: str) -> tuple[int, int]:
        """(members of the running generation, members with a good lease) of a role."""
        return self._count(role), sum(key[0] == role for key in self.members)

    # ---- questions

    def _live(self, key: Key) -> bool:
        """Whether `key`, in its present incarnation, is part of a generation that runs."""
        generation = self.generation
        if generation is None or self.state not in ("running", "draining"):
            return False
        if key not in generation.members or key in generation.lost:
            return False
        member = self.members.get(key)
        return member is None or member.report.incarnation == generation.members[key]

    def _member_of_generation(self, key: Key) -> bool:
        return self.generation is not None and key in self.generation.members

    def _stopped(self, key: Key) -> bool:
        """Whether `key` surely has no worker of the generation: it said so after it had read this epoch's order."""
        member = self.members.get(key)
        if member is None:
            return True  # silent for a lease: it has ended its own worker
        return member.report.state not in ALIVE and member.report.epoch >= self.epoch

    def _fixed(self, key: Key) -> bool:
        return not self.roles[key[0]].elastic

    def _leaving(self, key: Key) -> bool:
        member = self.members.get(key)
        return member is not None and member.report.leaving

    def _count(self, role: str) -> int:
        if self.generation is None:
            return 0
        return sum(key[0] == role and self._live(key) for key in self.generation.members)
