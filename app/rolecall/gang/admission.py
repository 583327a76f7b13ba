"""Whether there is to be another generation, whom it takes in, and what its start waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rolecall.gang.protocol import MAX_BACKOFF, Key, Role, Rules, name_of
from rolecall.gang.roster import Member

Members = Mapping[Key, Member]


class Progress:
    """The steps made, the failures since the last new one, and the time that a recovery takes."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._step = 0
        self._failures: dict[int, str] = {}
        self._broken_at: float | None = None

    def made(self, step: int, now: float) -> list[tuple[str, dict[str, Any]]]:
        """`step` was finished. Returns the event that this is, where it ends a recovery."""
        if step > self._step:
            self._failures.clear()
        self._step = max(self._step, step)
        broken_at, self._broken_at = self._broken_at, None
        return [] if broken_at is None else [("recovered", {"seconds": now - broken_at})]

    def broke(self, now: float) -> None:
        """A generation ended."""
        self._broken_at = now

    def failed(self, generation: int, reason: str) -> str | None:
        """A worker raised. Returns the first reason, once as many generations as are allowed have come to that."""
        self._failures.setdefault(generation, reason)
        return next(iter(self._failures.values())) if len(self._failures) >= self._max_failures else None


class Admission:
    """Counts by role, the backoff of elastic ranks that die young, and the workers that may live on unseen.

    The first start waits for every role's count, or for as many of an elastic role as there were before; an elastic
    role's minimum is enough after `join_grace`, and for every later start. `previous` are the members of generation
    `last`, of an earlier coordinator's time.
    """

    def __init__(self, roles: Mapping[str, Role], rules: Rules, last: int, previous: tuple[Key, ...]) -> None:
        self._roles, self._rules, self._last, self._previous = roles, rules, last, previous
        before = {name: sum(key[0] == name for key in previous) for name in roles}
        self._wanted = {name: (role.elastic and before[name]) or role.count for name, role in roles.items()}
        self._fenced_at = float("-inf")
        self._deaths: dict[Key, int] = {}
        self._until: dict[Key, float] = {}
        self._since: dict[Key, float] = {}  # when each was taken in; generations that end for others' sake do not count

    def started(self, members: Iterable[Key], now: float) -> None:
        """A generation of `members` began."""
        self._since = {key: self._since.get(key, now) for key in members}
        self._wanted = {name: role.minimum for name, role in self._roles.items()}
        self._previous = ()

    def died(self, key: Key, now: float) -> None:
        """An elastic rank's worker died. One that does so soon after it was taken in, again and again, waits, twice as
        long every time."""
        young = now - self._since.pop(key, now) < self._rules.young
        deaths = self._deaths[key] = self._deaths.get(key, 0) + 1 if young else 0
        doublings = min(deaths - 1, 10)
        self._until[key] = now + min(self._rules.rejoin_interval * 2**doublings, MAX_BACKOFF) if deaths > 1 else now

    def replaced(self, old: Member) -> None:
        """`old` had a worker, and may live on elsewhere: it ends that within a lease."""
        self._fenced_at = max(self._fenced_at, old.heard_at + self._rules.lease)

    def newcomers(self, others: Members, now: float) -> list[Key]:
        """Those of `others` for whom a running generation may be drained."""
        return sorted(key for key, each in others.items() if each.idle and not each.leaving and self._welcome(key, now))

    def chosen(self, members: Members, now: float) -> list[Key]:
        """The members of a generation that would start now, in order of rank. A rank that backs off is taken all the
        same where its role would be too small without it."""
        chosen = []
        for role in self._roles.values():
            here = sorted(key for key, member in members.items() if key[0] == role.name and not member.leaving)
            welcome = [key for key in here if self._welcome(key, now)]
            chosen += welcome if role.elastic and len(welcome) >= role.minimum else here
        return chosen

    def wanted(self, name: str, waited: float) -> int:
        """How many of the role `name` a start waits for, `waited` seconds after the gathering began."""
        role = self._roles[name]
        enough = role.elastic and waited >= self._rules.join_grace
        return role.minimum if enough else max(role.minimum, self._wanted[role.name])

    def missing(self, members: Members, waited: float, now: float) -> list[str]:
        """What a start still waits for, in words, `waited` seconds after the gathering began."""
        missing = []
        chosen = self.chosen(members, now)
        for role in self._roles.values():
            have = sum(key[0] == role.name for key in chosen)
            want = self.wanted(role.name, waited)
            if have < want:
                missing.append(f"{role.name} ({have} of {want} in)")
        missing += [f"the old worker of {name_of(key)} to stop" for key, member in members.items() if not member.idle]
        if waited < self._rules.lease:
            absent = [key for key in self._previous if not self._is_back(members.get(key))]
            missing += [f"{name_of(key)}, in the last generation" for key in absent]
        if now < self._fenced_at:
            missing.append("a rank that was replaced to end its worker")
        return missing

    def _is_back(self, member: Member | None) -> bool:
        """Whether this is who had its place in the last generation; an assigned place may have gone to another."""
        return member is not None and (member.report.ordinal is not None or member.report.generation >= self._last)

    def _welcome(self, key: Key, now: float) -> bool:
        return self._until.get(key, now) <= now
