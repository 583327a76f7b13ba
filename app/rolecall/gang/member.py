"""A member of a gang: when its worker starts, ends, joins and leaves a generation, what it reports, and when it exits.
Pure logic.

Its supervisor sends `beat()` and reports the result by `answered`, `failed` or `refused`. It carries out `next_action`
and confirms it by `action_done`; then, or when the worker's status changes, it sends the next beat at once. It calls
`tick` at least `TICKS` times a lease. It exits with `exit_code` once `exits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from rolecall.errors import FAILED, USAGE
from rolecall.gang.directives import name_of_directive, name_of_list, unpack
from rolecall.gang.protocol import (
    ALIVE,
    ATTACHED,
    DETACH,
    DETACHED,
    FENCE,
    OVER,
    ActionKind,
    Answer,
    Beat,
    Directive,
    Heartbeat,
    Key,
    Rules,
    WorkerStatus,
)

RETRY_SECONDS = 0.2  # from a failed request to the next, unless there is something new to report
TICKS = 24  # a lease
MAX_LOSSES = 256  # a heartbeat: many more than one request may hold can be lost at once


@dataclass(frozen=True)
class Action:
    """The next thing to do for a directive.

    | kind | what |
    | --- | --- |
    | start, load | start a worker as a part of the generation; or without one |
    | attach, detach | make the live worker a part of the generation; or take it out of its own |
    | update | pass on what is new: to an attached worker the members and a drain, to another the generation's number |
    | end | end the worker |
    """

    kind: ActionKind
    directive: Directive


class Member:
    """One rank's side of the gang. Each heartbeat repeats `identity`: role, ordinal, incarnation, node, job, and the
    shared settings. Times are in seconds."""

    def __init__(self, rules: Rules, identity: Heartbeat, now: float) -> None:
        self.rules, self.identity = rules, identity
        self.directive: Directive | None = None  # the newest
        self.leaving = False
        self.acknowledged = False  # it knows how the job ended
        self.over = False  # no heartbeat is due any more
        self.exit_code: int | None = None
        self.retries = 0  # requests in a row that were not answered
        self.contact = now  # when the newest request was sent that was answered
        self.abandoned = False  # it exits since rank 0 was restarted for too long, and no generation began
        self._coordinator = ""  # the incarnation that gave the newest directive
        self._restarts_since = -1, now  # the last generation, and since when rank 0 was restarted without another one
        self._list: tuple[str, tuple[Key, ...]] = "", ()  # the newest list of members, by its name
        self._reported: Heartbeat | None = None  # the last that was answered
        self._taken = (0, 0), 0  # of the worker's part, how many losses the coordinator has taken
        self._sequence = 0
        self._epoch = 0  # of the last directive that was carried out
        self._place: Key | None = None  # that the worker was started for
        self._current: Directive | None = None  # being carried out, in one or a few actions
        self._completed: Directive | None = None
        self._acting = False
        self.hurried = False  # by a signal
        self._leave_by = float("inf")
        self._ticked = now
        self._awake_since = now

    # ---- heartbeats

    def heartbeat(self, worker: WorkerStatus) -> Heartbeat:
        """The next heartbeat."""
        self._sequence += 1
        unknown = self._reported is None or self.retries > 0  # to the coordinator, which may have been restarted
        taken = self._losses_taken(worker)
        worker = replace(worker, lost_peers=worker.lost_peers[taken : taken + MAX_LOSSES])
        return replace(
            self.identity,
            sequence=self._sequence,
            epoch=self._epoch,
            worker=worker,
            leaving=self.leaving,
            acknowledged=self.acknowledged,
            settings=self.identity.settings if unknown else None,
        )

    def beat(self, worker: WorkerStatus) -> Beat:
        """The next request: the heartbeat, if it says something new, and what the coordinator need not repeat."""
        heartbeat, reported = self.heartbeat(worker), self._reported
        more = len(worker.lost_peers) - self._losses_taken(worker) > MAX_LOSSES  # they follow the answer
        known = "" if more else self.known
        beat = Beat(self.identity.incarnation, heartbeat.sequence, known=known, listed=self._list[0])
        if reported is not None and not self.retries:
            same = replace(heartbeat, sequence=reported.sequence, settings=reported.settings) == reported
            if same:
                return replace(beat, since=reported.sequence)
        return replace(beat, heartbeat=heartbeat)

    def _losses_taken(self, worker: WorkerStatus) -> int:
        part, count = self._taken
        return count if part == (worker.generation, worker.join) else 0

    @property
    def known(self) -> str:
        """Names the directive that the coordinator need not repeat. Empty asks for an answer at once: after a failed
        request, and to acknowledge the job's end."""
        if self.retries or self.acknowledged or self.directive is None:
            return ""
        return name_of_directive(self._coordinator, self.directive)

    def silence(self, now: float) -> float:
        """Seconds since the newest answered request was sent."""
        return now - self.contact

    def answered(self, beat: Beat, sent_at: float, answer: Answer, now: float) -> bool:
        """The answer to `beat`. Returns False if it lacks something, or came too late: the gang may have given this
        member up since. Then the request counts as failed."""
        if now - sent_at > self.rules.lease * FENCE:
            return False
        if answer.again:
            self._reported = None
            return beat.heartbeat is None  # renews no lease; the whole heartbeat follows
        if answer.directive is not None:
            restarted = answer.coordinator != self._coordinator
            if not self._take(answer, answer.directive):
                return False
            if restarted:
                self._judge_restart(answer.directive, now)
        elif not beat.known:
            return False
        if beat.heartbeat is not None:
            self._reported, worker = beat.heartbeat, beat.heartbeat.worker
            self._taken = (worker.generation, worker.join), self._losses_taken(worker) + len(worker.lost_peers)
        self.contact, self.retries = sent_at, 0
        if self.directive and self._reported and self._reported.acknowledged:
            self.over = True
            self.exit(self.directive.code)
        return True

    def _judge_restart(self, directive: Directive, now: float) -> None:
        """Another coordinator answers. Exits if they follow each other for longer than one may wait for the others."""
        begun, since = self._restarts_since
        if directive.kind not in ("stop", "detach") or directive.begun != begun:
            self._restarts_since = directive.begun, now
        elif now - since > self.rules.rejoin_timeout and self.exit_code is None:
            self.abandoned = True
            self.exit(USAGE)

    def heard(self, sent_at: float, answer: Answer, now: float) -> None:
        """The answer to a beat that a newer one has outdated: it only proves contact."""
        if not answer.again and now - sent_at <= self.rules.lease * FENCE:
            self.contact = max(self.contact, sent_at)

    def _take(self, answer: Answer, directive: Directive) -> bool:
        """Takes the directive of `answer`. Returns False if its list of members is missing."""
        members: tuple[Key, ...] = ()
        if directive.kind == "run":
            name = name_of_list(answer.coordinator, directive.generation, directive.listed)
            if answer.members is not None:
                self._list = name, unpack(answer.members)
            elif self._list[0] != name:
                return False
            members = self._list[1]
        directive = replace(directive, members=members, lost=unpack(answer.lost))
        self._coordinator = answer.coordinator
        if directive != self.directive:
            self.directive = directive
        return True

    def failed(self, now: float) -> None:
        """A request got no answer. Exits if there is nobody left to wait for."""
        self.retries += 1
        silence, lease = self.silence(now), self.rules.lease
        if self.leaving and silence > lease / 3:
            self.exit(0)  # rank 0 is gone, and cannot drain
        if self.acknowledged and self.directive and silence > lease * FENCE:
            self.exit(self.directive.code)  # rank 0 did not wait for the last heartbeat
        if silence > self.rules.rejoin_timeout and self.retries > 1:
            self.exit(USAGE)

    def refused(self) -> None:
        """The coordinator refuses this rank."""
        self.over = True
        self.exit(USAGE)

    # ---- directives

    def next_action(self, worker: WorkerStatus) -> Action | None:
        """The next action for the newest directive; None while one is under way, or if nothing is left to do.

        A directive is carried out wholly before the next one. There is one worker at a time, and it is started or
        attached once for each part in a generation.
        """
        if self._acting or (self._current is None and self.directive is self._completed):
            return None
        directive = self._current = self._current or self.directive
        assert directive is not None
        self._acting = True
        return Action(self._kind(directive, worker), directive)

    def _kind(self, directive: Directive, worker: WorkerStatus) -> ActionKind:
        attached, idle = worker.state in ATTACHED, worker.state in DETACHED
        same = (worker.generation, worker.join) == (directive.generation, directive.join)
        moved = self._place not in (None, _place(directive))
        if moved and worker.state in ALIVE and directive.kind in ("run", "load"):
            return "end"
        match directive.kind:
            case "run" if same and (worker.outcome or not idle):
                return "update"  # an idle one with an outcome was this part, and has left
            case "run" if attached:
                return "detach" if directive.stays else "end"
            case "run":
                return "attach" if idle else "start"
            case "load" | "detach" if attached:
                return "detach"
            case "load" if not same and not idle:
                return "load"
            case "load" | "detach":
                return "update"  # one that failed to load for this part is not started again: the gang decides
        return "end"  # stop, leave, finished, failed

    def action_done(self, action: Action) -> None:
        """`action` was carried out."""
        self._acting, directive = False, action.directive
        if action.kind in ("start", "load", "attach"):
            self._place = _place(directive)
        if action.kind in ("end", "detach") and directive.kind in ("run", "load"):
            return  # the start, or the like, follows
        if action.kind in ("start", "attach") and directive.drain:
            return  # the update follows: a worker learns of a drain only while it runs
        self._current, self._completed, self._epoch = None, directive, directive.epoch
        if directive.kind == "leave":
            self.exit(0)
        self.acknowledged |= directive.kind in OVER

    # ---- time

    def tick(
        self, now: float, worker_heartbeat: float | None, attached: bool = True
    ) -> Literal["", "detach", "silent", "stopped"]:
        """Moves on to `now`; a live worker was last heard from at `worker_heartbeat`, and may be `attached` to a
        generation. Returns `detach` if it is to leave that because rank 0 is silent. If it is to be killed, returns its
        outcome: `silent`, or `stopped` by the fence."""
        if self.directive and self.directive.busy:
            self._leave_by += now - self._ticked
        if now - self._ticked > self.rules.lease / 3:
            self._awake_since = now  # this process was suspended, and the worker may have been too
        self._ticked = now
        if now > self._leave_by:
            self.exit(FAILED)
        if self.is_silent(now, worker_heartbeat):
            return "silent"
        silence, lease = self.silence(now), self.rules.lease
        if attached and silence > lease * FENCE:
            return "stopped"
        stays = self.directive is not None and self.directive.kind == "run" and self.directive.stays
        return "detach" if attached and stays and silence > lease * DETACH else ""

    def is_silent(self, now: float, worker_heartbeat: float | None) -> bool:
        """Whether a live worker has been silent for a lease."""
        return worker_heartbeat is not None and now - max(worker_heartbeat, self._awake_since) > self.rules.lease

    # ---- the end

    def leave(self, now: float) -> None:
        """SIGTERM or SIGINT: leaves after a drain; at once if it has not joined, and at the second signal."""
        self.hurried = True
        if self.leaving:
            self.exit(FAILED)
        elif self.directive is None:
            self.exit(0)
        elif self.exit_code is None:
            self.leaving, self._leave_by = True, now + self.rules.drain_timeout + self.rules.lease / 2

    def exit(self, code: int) -> None:
        """Exits with `code`, unless it exits already."""
        if self.exit_code is None:
            self.exit_code = code

    def exits(self, settled: bool) -> bool:
        """Whether it exits now. Rank 0 stays until the gang has `settled`, so that every member learns how the job
        ended, or until a signal; the others do not wait."""
        return self.exit_code is not None and (settled or self.hurried or not self.acknowledged)


def _place(directive: Directive) -> Key:
    return directive.role, directive.ordinal
