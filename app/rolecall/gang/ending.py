"""The end of the job: it is over once that is on disk, and rank 0 waits until every member knows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rolecall.gang.protocol import Effect, Heartbeat, Key, RoleSpec, Rules, Verdict


class Ending:
    """How a job with `roles` ends. If it has ended already, those of the `previous` generation that no role counts
    get a lease from `now` on to say that they are there.
    """

    def __init__(self, rules: Rules, roles: tuple[RoleSpec, ...], previous: Collection[Key], now: float) -> None:
        self._rules, self._rank0 = rules, (roles[0].name, 0)
        self.finished: dict[str, Any] | None = None  # what rank 0's worker has returned; DONE is not on disk
        self.verdict: Verdict | None = None  # FAILED is not on disk
        self._uninformed = {(role.name, ordinal) for role in roles for ordinal in range(role.count)}
        self._heard_since = now if {*previous} - self._uninformed else float("-inf")

    @property
    def effect(self) -> Effect | None:
        """What ends the job once it is on disk."""
        if self.finished is not None:
            return Effect("done", summary=self.finished)
        return Effect("failed", verdict=self.verdict) if self.verdict else None

    def begin(self, members: Collection[Key]) -> None:
        """The job is over, which `members` are to learn."""
        self.finished = self.verdict = None
        self._uninformed = set(members)

    def hear(self, key: Key, heartbeat: Heartbeat) -> None:
        """What the member `key` says once the job is over."""
        if heartbeat.acknowledged or heartbeat.leaving:
            self._uninformed.discard(key)
        else:
            self._uninformed.add(key)

    def resumed(self, now: float) -> None:
        """This process was suspended: a member may have been restarted since it acknowledged, and gets a lease."""
        self._heard_since = now

    def settled(self, since: float, now: float) -> bool:
        """Whether every member knows of the end at `since`, or had `finish_grace` seconds to learn it."""
        informed = now - self._heard_since > self._rules.lease and self._uninformed <= {self._rank0}
        return informed or now - since > self._rules.finish_grace
