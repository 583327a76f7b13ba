"""The gang's state, and its transitions: a generation drains or stops, a member is lost, the job ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from rolecall.gang.admission import Admission
from rolecall.gang.budget import Progress
from rolecall.gang.protocol import (
    HOLD,
    Agreement,
    Budget,
    Cause,
    Event,
    GangState,
    Key,
    RoleSpec,
    Rules,
    Verdict,
)
from rolecall.gang.roster import Generation, MemberRecord, Roster


class Lifecycle:
    """The state of a gang. `incarnation` is that of rank 0, where the coordinator runs.

    `last`, `previous`: the last generation's number and members, as persisted; `done`: DONE's summary, if there is one;
    `failed`: how the job failed for good, if it has; `budget`: what was spent without progress. Members of another
    `job`, as heartbeats name it, or with settings other than `agreement` are refused; empty: none are.
    `since` is when it entered its `state`, in seconds. A directive carries the `epoch` at which it was first given, and
    an epoch names one directive of a member. `revision` grows whenever any member's directive may have changed.
    """

    def __init__(
        self,
        roles: tuple[RoleSpec, ...],
        rules: Rules,
        incarnation: str,
        now: float,
        last: int = 0,
        previous: tuple[Key, ...] = (),
        done: dict[str, Any] | None = None,
        job: str = "",
        agreement: Agreement | None = None,
        failed: Verdict | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.roles = {role.name: role for role in roles}
        self.rules = rules
        self.master: Key = (roles[0].name, 0)
        self.members: OrderedDict[Key, MemberRecord] = OrderedDict()  # the one that is silent for longest comes first
        self.generation = Generation(last, {}, now)
        self.state: GangState = "gathering" if done is None else "finished"
        self.state = "failed" if failed else self.state
        self.number = last
        self.epoch = 1
        self.incarnation = incarnation
        self.revision = 0
        self.since = now
        self.reason = failed.reason if failed else ""
        self.code = failed.code if failed else 0
        self.final = bool(failed and failed.final)
        self.summary = done or {}
        self.events: list[Event] = []
        self._roster = Roster(self.roles, self.master, incarnation, job, agreement or Agreement())
        self._admission = Admission(self.roles, rules, last, previous)
        self._progress = Progress(rules, budget or Budget(), now)
        everyone = {(role.name, ordinal) for role in roles for ordinal in range(role.count)}
        self._uninformed = (
            set[Key]() if done is None and not failed else everyone
        )  # members that may not know how the job ended
        self._ticked = now
        self._resumed_at = float("-inf")  # after a pause of this process
        self._finishing = False
        self._leavers: set[Key] = set()  # the members that asked to leave
        self._verdict: Verdict | None = None  # of a job that fails, until that is on disk

    # ---- transitions

    def _enter(self, state: GangState, now: float) -> None:
        self.state, self.since = state, now
        self._advance()

    def _advance(self) -> None:
        """Any directive may be another from here on."""
        self.epoch += 1
        self.revision += 1

    def _drain(self, reason: str, now: float) -> None:
        self.reason = reason
        self.generation.busy_since, self.generation.excused = None, 0.0
        self._enter("draining", now)
        self.events.append(("draining", {"reason": reason}))

    def _train_on(self, now: float) -> None:
        """Gives the drain up; the next try comes after another interval."""
        self.generation.drain_after = now + self.rules.rejoin_interval
        self._enter("running", now)
        self.events.append(("drain given up", {"reason": self.reason}))

    def _stop(self, cause: Cause, reason: str, now: float, what: str = "") -> None:
        """Ends the generation; `what` was seen. Or the job, where that is one without progress too many."""
        if failure := self._progress.ended(cause, what or reason, now):
            self._fail(failure, now)
            return
        self.reason = reason
        working = [self.members[key] for key in self.generation.keys if self._live(key)]
        self._enter("stopping", now)
        for member in working:
            member.stop_epoch = self.epoch  # an earlier heartbeat without a worker may be older than its worker
        self.events.append(("stopped", {"cause": cause, "reason": reason}))

    def _fail(self, verdict: Verdict, now: float) -> None:
        """The job fails: once that is on disk, where it is for good."""
        if verdict.final:
            self._verdict = verdict
        else:
            self._failed(verdict, now)

    def _failed(self, verdict: Verdict, now: float) -> None:
        self._verdict = None
        self.reason, self.code, self.final = verdict.reason, verdict.code, verdict.final
        self._end("failed", now)
        self.events.append(("failed", {"reason": verdict.reason}))

    def _end(self, state: GangState, now: float) -> None:
        """The job is over. Members that are away for a moment must learn so too."""
        away = () if self.state == "gathering" else self.generation.members
        keys, lost = (*self.members, *away), self.generation.lost
        self._uninformed = {key for key in keys if not self._leaving(key) and lost.get(key) != "left"}
        self._enter(state, now)

    def _lose(self, key: Key, cause: Cause, reason: str, now: float, what: str = "") -> None:
        """A member's worker has ended, or the member is given up: the generation ends, or continues without it where
        it is elastic. `what` was seen."""
        if not self._live(key) or self._closing:
            return
        if self._elastic(key) and cause not in ("left", "lost"):
            self._admission.died(key, now)
        if not self._elastic(key) or not self.generation.connected:
            self._stop(cause, reason, now, what)
            return
        self.generation.lose(key, cause, what or reason)
        if cause == "lost":  # it lost a peer, which reports its own end in a moment
            self.generation.hold_until = now + HOLD
        self._advance()
        self.members[key].stop_epoch = self.epoch
        self.events.append(("lost", {"cause": cause, "reason": reason}))

    # ---- questions

    @property
    def budget(self) -> Budget:
        """What has been spent without progress, to be kept on disk."""
        return self._progress.budget

    @property
    def _closing(self) -> bool:
        """Whether the job is over, as soon as that is on disk."""
        return self._finishing or self._verdict is not None

    def _live(self, key: Key) -> bool:
        """Whether `key`, in its present incarnation, is part of a generation that runs."""
        return self.state in ("running", "draining") and self.generation.has(key, self.members.get(key))

    def _elastic(self, key: Key) -> bool:
        return self.roles[key[0]].elastic

    def _leaving(self, key: Key) -> bool:
        return key in self._leavers

    def _count(self, role: str) -> int:
        return self.generation.count(role) if self.state in ("running", "draining") else 0
