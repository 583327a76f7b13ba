"""Admission: whether a generation may start, which members it has, and who waits for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rolecall.errors import FAILED
from rolecall.gang.directives import text_of
from rolecall.gang.protocol import MAX_BACKOFF_SECONDS, Event, Key, RoleSpec, Rules, Verdict, name_of
from rolecall.gang.roster import MemberRecord, Members

TELL_SECONDS = 10.0  # between two events that tell what a start waits for


class Admission:
    """Counts by role, the backoff of elastic ranks, and workers that may live on unseen.

    The first start waits for every role's count, or for as many of an elastic role as there were before. An elastic
    role's minimum is enough after `join_grace`, and for every later start. `previous` are the members of generation
    `last`, which an earlier coordinator started. `events` take a rank that is given up.
    """

    def __init__(
        self, roles: Mapping[str, RoleSpec], rules: Rules, last: int, previous: tuple[Key, ...], events: list[Event]
    ) -> None:
        self._roles, self._rules, self._last, self._previous, self._events = roles, rules, last, previous, events
        before = {name: sum(key[0] == name for key in previous) for name in roles}
        self._wanted = {name: before[name] if role.elastic and previous else role.count for name, role in roles.items()}
        self._fenced_at = self._told_at = float("-inf")
        self._deaths: dict[Key, int] = {}
        self._until: dict[Key, float] = {}
        self._since: dict[Key, float] = {}  # when each joined; generations that end because of others do not count

    def started(self, members: Iterable[Key], now: float) -> None:
        """A generation of `members` began."""
        self._since = {key: self._since.get(key, now) for key in members}
        self._wanted = {name: role.minimum for name, role in self._roles.items()}
        self._previous = ()

    def joined(self, members: Iterable[Key], now: float) -> None:
        """`members` have joined the generation."""
        self._since.update({key: self._since.get(key, now) for key in members})

    def died(self, key: Key, end: str, now: float) -> Verdict | None:
        """An elastic rank's worker died, as `end` says. A rank that dies soon after it joined, again and again, is
        readmitted with exponential backoff, as often as its role allows. Returns the job's verdict, if that fails."""
        role = self._roles[key[0]]
        early = now - self._since.pop(key, now) < self._rules.stable_after
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1 if early else 0
        pause = 2 * self._rules.rejoin_interval if role.backoff is None else role.backoff
        doublings = min(deaths - 2, 10)
        self._until[key] = now + min(pause * 2**doublings, MAX_BACKOFF_SECONDS) if deaths > 1 else now
        if role.restarts is None or deaths <= role.restarts:
            return None
        self._until[key] = float("inf")
        times = f" {deaths} times in a row," if deaths > 1 else ""
        story = f"{name_of(key)} died{times} before it had been in for {self._rules.stable_after:g} s: {end}"
        if role.required:
            return Verdict(story, FAILED)
        self._events.append(Event("given up", reason=story))
        return None

    def replaced(self, key: Key, old: MemberRecord) -> None:
        """`old`, at the place `key`, had a worker, and may live on elsewhere: it ends that worker within a lease."""
        fenced_at = old.received_at + self._rules.lease
        self._fenced_at = max(self._fenced_at, fenced_at)
        self._until[key] = max(self._until.get(key, fenced_at), fenced_at)

    def newcomers(self, others: Members, now: float) -> list[Key]:
        """Those of `others` for which a running generation may be drained."""
        return sorted(key for key, each in others.items() if each.idle and not each.leaving and self._welcome(key, now))

    def chosen(self, members: Members, now: float) -> list[Key]:
        """The members of a generation that would start now, in order of rank: without those that wait for a backoff, or
        load a worker, unless a role would have too few members."""
        staying: dict[str, list[Key]] = {name: [] for name in self._roles}
        for key, member in members.items():
            if not member.leaving:
                staying[key[0]].append(key)
        chosen = []
        for name, role in self._roles.items():
            welcome = [key for key in staying[name] if self._welcome(key, now)]
            loaded = [key for key in welcome if members[key].heartbeat.worker.state != "loading"]
            for keys in (loaded, welcome):
                if role.elastic and len(keys) >= role.minimum:
                    chosen += sorted(keys)
                    break
            else:
                chosen += sorted(staying[name])
        return chosen

    def wanted(self, name: str, waited: float) -> int:
        """How many members of the role `name` a start waits for, `waited` seconds after the gathering began."""
        role = self._roles[name]
        enough = role.elastic and waited >= self._rules.join_grace
        return role.minimum if enough else max(role.minimum, self._wanted[role.name])

    def missing(self, members: Members, waited: float, now: float) -> list[str]:
        """What a start still waits for, in words, `waited` seconds after the gathering began."""
        missing = []
        counts = Counter(role for role, _ in self.chosen(members, now))
        for role in self._roles.values():
            have, want = counts[role.name], self.wanted(role.name, waited)
            if have < want:
                missing.append(f"{role.name} ({have} of {want} in)")
        if busy := sorted(key for key, member in members.items() if not member.idle):
            missing.append(f"the old worker of {text_of(busy)} to stop")
        if waited < self._rules.lease:
            absent = [key for key in self._previous if not self._is_back(members.get(key))]
            missing += [f"{text_of(absent)}, in the last generation"] if absent else []
        if now < self._fenced_at:
            missing.append("a rank that was replaced to end its worker")
        return missing

    def tell(self, missing: list[str], since: float, now: float) -> None:
        """An event tells what a start still waits for, `since` the gathering began, now and then."""
        if missing and now - max(self._told_at, since) > TELL_SECONDS:
            self._told_at = now
            self._events.append(Event("waiting", reason=", ".join(missing)))

    def _is_back(self, member: MemberRecord | None) -> bool:
        """Whether this member had its place in the last generation; an assigned place may have gone to another."""
        if member is None:
            return False
        return member.heartbeat.ordinal is not None or member.heartbeat.worker.generation >= self._last

    def _welcome(self, key: Key, now: float) -> bool:
        return self._until.get(key, now) <= now
