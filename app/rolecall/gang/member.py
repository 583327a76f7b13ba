"""A member of a gang: when its worker starts, ends, joins and leaves a generation, what it reports, and when it exits.
Pure logic.

The driver calls a method for each event, does what the returned `Batch` says, and calls `tick` once the batch's
deadline has passed. It reports what became of a request by `answered`, `failed` or `refused`, and of an action by
`done`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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
SAME_SIGNAL_SECONDS = 1.0  # within which signals are one: a job manager may signal all processes of a rank
LOG_REPEAT_SECONDS = 30.0  # between two notes that rank 0 cannot be reached
WorkerOrder = Literal["", "detach", "silent", "stopped"]


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


@dataclass(frozen=True)
class Request:
    """A beat, and when it was sent."""

    beat: Beat
    sent_at: float


@dataclass(frozen=True)
class Note:
    """A line for the member's log, with fields; of a `cause` perhaps, and perhaps an error."""

    line: str
    fields: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    error: bool = False


@dataclass(frozen=True)
class Batch:
    """What a supervisor is to do now: to send a request, which outdates the one before; to carry out an action; to
    detach the worker or kill it, with that outcome; to take its name from a new place; to log notes, and count a
    request that `failed`. `tick` is due at `deadline`.

    `exit_code` is there once the rank is over, and it `exits` if nobody else needs it.
    """

    request: Request | None
    action: Action | None
    worker: WorkerOrder
    place: Key | None
    notes: tuple[Note, ...]
    failed: bool
    exit_code: int | None
    exits: bool
    deadline: float


class Member:
    """One rank's side of the gang. Each heartbeat repeats `identity`: role, ordinal, incarnation, node, job, and the
    shared settings. `status` says how its worker is; `rank0` is rank 0's address and port, for messages; `is_rank0` if
    it keeps the gang itself. Times are in seconds."""

    def __init__(
        self,
        rules: Rules,
        identity: Heartbeat,
        status: Callable[[], WorkerStatus],
        now: float,
        *,
        rank0: tuple[str, int] = ("", 0),
        is_rank0: bool = False,
    ) -> None:
        self.rules, self.identity = rules, identity
        self.directive: Directive | None = None  # the newest
        self.leaving = False
        self.acknowledged = False  # it knows how the job ended
        self.sending = False  # heartbeats are due: from `start` until rank 0 knows that it knows how the job ended
        self.exit_code: int | None = None
        self.retries = 0  # requests in a row that were not answered
        self.contact = now  # when the newest request was sent that was answered
        self._status, self._rank0, self._is_rank0 = status, rank0, is_rank0
        self._request: Request | None = None  # the newest, if it has no answer yet
        self._retry_at = now
        self._new_place: Key | None = None
        self._notes: list[Note] = []
        self._noted_at = now  # that rank 0 cannot be reached
        self._signalled_at = float("-inf")
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

    def _batch(
        self,
        now: float,
        *,
        send: bool = False,
        worker: WorkerOrder = "",
        failed: bool = False,
        settled: bool = False,
    ) -> Batch:
        request = Request(self._beat(), now) if send and self.sending else None
        self._request = request or self._request
        notes, place, self._notes, self._new_place = tuple(self._notes), self._new_place, [], None
        stays = self._is_rank0 and self.acknowledged and not settled and not self.hurried
        watch_at = self._ticked + self.rules.lease / TICKS
        return Batch(
            request,
            self._next_action(),
            worker=worker,
            place=place,
            notes=notes,
            failed=failed,
            exit_code=self.exit_code,
            exits=self.exit_code is not None and not stays,
            deadline=watch_at if self._request or not self.sending else min(watch_at, self._retry_at),
        )

    def _note(self, line: str, *, cause: str = "", error: bool = False, **fields: Any) -> None:
        self._notes.append(Note(line, fields, cause, error))

    # ---- heartbeats

    def start(self, now: float) -> Batch:
        """Joins the gang."""
        self.sending = True
        return self._batch(now, send=True)

    def changed(self, now: float) -> Batch:
        """The worker's status is another one."""
        return self._batch(now, send=True)

    def _beat(self) -> Beat:
        """The next request: the heartbeat, if it says something new, and what the coordinator need not repeat."""
        self._sequence += 1
        worker, reported = self._status(), self._reported
        unknown = reported is None or self.retries > 0  # to the coordinator, which may have been restarted
        taken = self._losses_taken(worker)
        heartbeat = replace(
            self.identity,
            sequence=self._sequence,
            epoch=self._epoch,
            worker=replace(worker, lost_peers=worker.lost_peers[taken : taken + MAX_LOSSES]),
            leaving=self.leaving,
            acknowledged=self.acknowledged,
            settings=self.identity.settings if unknown else None,
        )
        # asks for an answer at once: after a failed request, to acknowledge the job's end, or if more losses follow
        asks = self.retries or self.acknowledged or len(worker.lost_peers) - taken > MAX_LOSSES
        known = "" if asks or self.directive is None else name_of_directive(self._coordinator, self.directive)
        beat = Beat(self.identity.incarnation, heartbeat.sequence, known=known, listed=self._list[0])
        if reported is not None and not self.retries:
            same = replace(heartbeat, sequence=reported.sequence, settings=reported.settings) == reported
            if same:
                return replace(beat, since=reported.sequence)
        return replace(beat, heartbeat=heartbeat)

    def _losses_taken(self, worker: WorkerStatus) -> int:
        part, count = self._taken
        return count if part == (worker.generation, worker.join) else 0

    def answered(self, request: Request, answer: Answer, now: float) -> Batch:
        """The answer to `request`. One that lacks something, or comes too late, is none: the gang may have given this
        member up since. One to an outdated request only proves contact: if there is news faster than answers come,
        there are no others."""
        if request is not self._request:
            if not answer.again and now - request.sent_at <= self.rules.lease * FENCE:
                self.contact = max(self.contact, request.sent_at)
            return self._batch(now)
        if not self._take_answer(request, answer, now):
            return self.failed(request, "the answer came too late", now)
        return self._batch(now, send=True)

    def _take_answer(self, request: Request, answer: Answer, now: float) -> bool:
        """Returns False if it is none."""
        beat = request.beat
        if now - request.sent_at > self.rules.lease * FENCE:
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
        self.contact, self.retries = request.sent_at, 0
        if self.directive and self._reported and self._reported.acknowledged:
            self.sending = False
            self._exit(self.directive.code)
        return True

    def _judge_restart(self, directive: Directive, now: float) -> None:
        """Another coordinator answers. Exits if they follow each other for longer than one may wait for the others."""
        begun, since = self._restarts_since
        if directive.kind not in ("stop", "detach") or directive.begun != begun:
            self._restarts_since = directive.begun, now
        elif now - since > self.rules.rejoin_timeout and self.exit_code is None:
            limit = f"REJOIN_TIMEOUT={self.rules.rejoin_timeout:g} s"
            problem = f"rank 0 was restarted for over {limit}, and no generation began; its log says why"
            self._note(f"MASTER_ADDR={self._rank0[0]}: {problem}", error=True)
            self._exit(USAGE)

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
        before = self.directive or self.identity
        if (before.role, before.ordinal) != _place(directive):
            self._new_place = _place(directive)
        if directive != self.directive:
            self.directive = directive
        return True

    def failed(self, request: Request, problem: str, now: float) -> Batch:
        """A request got no answer. Exits if there is nobody left to wait for."""
        if request is not self._request:
            return self._batch(now)
        self._request, self._retry_at = None, now + RETRY_SECONDS
        self.retries += 1
        silence, lease = now - self.contact, self.rules.lease
        limit, (address, port) = self.rules.rejoin_timeout, self._rank0
        if self.leaving or self.acknowledged:
            pass  # rank 0 may have ended, for a known reason
        elif self.retries == 1:
            self._noted_at, rank0 = now, f"{address}:{port}"
            self._note("rank 0 cannot be reached, retrying", address=rank0, problem=problem, deadline_s=limit)
        elif now - self._noted_at > LOG_REPEAT_SECONDS:
            self._noted_at = now
            self._note("still trying to reach rank 0", seconds=round(silence), problem=problem)
        if self.leaving and silence > lease / 3:
            self._exit(0)  # rank 0 is gone, and cannot drain
        if self.acknowledged and self.directive and silence > lease * FENCE:
            self._exit(self.directive.code)  # rank 0 did not wait for the last heartbeat
        if silence > limit and self.retries > 1 and self.exit_code is None:
            problem = f"rank 0 could not be reached at port {port} for {limit:g} s ({problem})"
            self._note(f"MASTER_ADDR={address}: {problem}", error=True)
            self._exit(USAGE)
        return self._batch(now, failed=True)

    def refused(self, request: Request, problem: str, now: float) -> Batch:
        """The coordinator refuses this rank."""
        if request is self._request:
            self._note(problem, error=True)
            self.sending = False
            self._exit(USAGE)
        return self._batch(now)

    # ---- directives

    def _next_action(self) -> Action | None:
        """The next action for the newest directive; None while one is under way, or if nothing is left to do.

        A directive is carried out wholly before the next one. There is one worker at a time, and it is started or
        attached once for each part in a generation.
        """
        if self._acting or (self._current is None and self.directive is self._completed):
            return None
        directive = self._current = self._current or self.directive
        assert directive is not None
        self._acting = True
        return Action(self._kind(directive, self._status()), directive)

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

    def done(self, action: Action, now: float) -> Batch:
        """`action` was carried out."""
        self._acting, directive = False, action.directive
        if action.kind in ("start", "load", "attach"):
            self._place = _place(directive)
        if action.kind in ("end", "detach") and directive.kind in ("run", "load"):
            return self._batch(now, send=True)  # the start, or the like, follows
        if action.kind in ("start", "attach") and (directive.drain or directive.paused):
            # the update follows: a worker learns of a drain, or a pause, only while it runs
            return self._batch(now, send=True)
        self._current, self._completed, self._epoch = None, directive, directive.epoch
        if directive.kind == "leave":
            self._note("left")
            self._exit(0)
        elif directive.kind == "failed" and not self.acknowledged and directive.code != USAGE:
            self._note("the job failed", cause=directive.reason, error=True)
        self.acknowledged |= directive.kind in OVER
        return self._batch(now, send=True)

    # ---- time

    def tick(self, now: float, heard_at: float | None) -> Batch:
        """Moves on to `now`; a live worker was last heard from at `heard_at`. It leaves its generation if rank 0 is
        silent. It is killed if it is `silent` itself, or `stopped` by the fence."""
        if self.directive and (self.directive.busy or self.directive.paused):
            self._leave_by += now - self._ticked
        if now - self._ticked > self.rules.lease / 3:
            self._awake_since = now  # this process was suspended, and the worker may have been too
        self._ticked = now
        if now > self._leave_by and self.exit_code is None:
            limit = self.rules.drain_timeout
            self._note("the drain took too long; leaving without it", error=True, deadline_s=limit)
            self._exit(FAILED)
        silence, lease, attached = now - self.contact, self.rules.lease, self._status().state in ATTACHED
        stays = self.directive is not None and self.directive.kind == "run" and self.directive.stays
        worker: WorkerOrder = "detach" if attached and stays and silence > lease * DETACH else ""
        if attached and silence > lease * FENCE:
            worker = "stopped"
        if self.is_silent(now, heard_at):
            worker = "silent"
        return self._batch(now, send=not self._request and now >= self._retry_at, worker=worker)

    def is_silent(self, now: float, worker_heartbeat: float | None) -> bool:
        """Whether a live worker has been silent for a lease."""
        return worker_heartbeat is not None and now - max(worker_heartbeat, self._awake_since) > self.rules.lease

    # ---- the end

    def leave(self, reason: str, now: float) -> Batch:
        """A signal, or a request for the same `reason`: leaves after a drain; at once if it has not joined, and at the
        second one."""
        if now - self._signalled_at < SAME_SIGNAL_SECONDS:
            return self._batch(now)
        self.hurried, self._signalled_at = True, now
        if self.leaving:
            self._exit(FAILED)
        elif self.directive is None:
            self._exit(0)
        elif self.exit_code is None:
            self._note("leaving", signal=reason, deadline_s=self.rules.drain_timeout)
            self.leaving, self._leave_by = True, now + self.rules.drain_timeout + self.rules.lease / 2
            return self._batch(now, send=True)
        return self._batch(now)

    def settled(self, now: float) -> Batch:
        """Every member knows how the job ended, or had time to learn it. Rank 0 stays until then, or until a signal."""
        return self._batch(now, settled=True)

    def exit(self, code: int, now: float) -> Batch:
        """It exits with `code`, unless it exits already."""
        self._exit(code)
        return self._batch(now)

    def _exit(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code


def _place(directive: Directive) -> Key:
    return directive.role, directive.ordinal
