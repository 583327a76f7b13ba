"""A worker's parts in generations, one after the other, as the worker itself goes through them. Pure logic.

The driver calls a method for each event, does what the returned batch says, in order, and calls `tick` once the batch's
deadline has passed. Times are monotonic seconds.

| step | what holds | moves on to |
| --- | --- | --- |
| meeting | the workers of the generation connect to each other | met; left: they cannot, or DETACH |
| met | they have met; the object is not made yet, or `attached` of an earlier part runs | introduced, serving |
| introduced | the object's method `attached` runs | serving: it has returned; left |
| serving | peers call, and the role's function runs | left: DETACH, ATTACH, or rank 0 is lost |
| left | nothing of the part is executed or answered any more | - |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rolecall.declare.task import Attachment
from rolecall.errors import RankError
from rolecall.messages.worker import Connected, Detached

Step = Literal["meeting", "met", "introduced", "serving", "left"]


class PartId(NamedTuple):
    """A part: the generation, and the number of the worker's part in it."""

    generation: int
    join: int


@dataclass(frozen=True)
class Failure:
    """What was raised, and in words; `lost`: because a peer is gone."""

    error: BaseException
    problem: str
    lost: bool


@dataclass(frozen=True)
class Meet:
    """Begin the part, and meet the others in a thread of its own. `met` or `not_met` follows."""

    attachment: Attachment


@dataclass(frozen=True)
class CallAttached:
    """Call the object's method `attached` for `part`, in a thread of its own. `attached` follows."""

    part: PartId


@dataclass(frozen=True)
class Serve:
    """Let peers of `part` call, and have the main thread ask for `next_run`."""

    part: PartId


@dataclass(frozen=True)
class Leave:
    """End what belongs to `part`: nothing of it is executed or answered any more."""

    part: PartId


@dataclass(frozen=True)
class Report:
    """Send the supervisor a message."""

    message: Connected | Detached


@dataclass(frozen=True)
class Fail:
    """End the process because of `error`, as one whose function raised it."""

    error: BaseException


Effect = Meet | CallAttached | Serve | Leave | Report | Fail


@dataclass(frozen=True)
class Batch:
    """What is to be done now, in order, and when `tick` is due."""

    effects: tuple[Effect, ...] = ()
    deadline: float = math.inf


class WorkerParts:
    """The parts of a worker, which goes on in the next generation if it `stays`. `attached` may run for `hook_limit`
    seconds beyond the moment that the next part needs it."""

    def __init__(self, *, stays: bool, hook_limit: float) -> None:
        self.stays, self.hook_limit = stays, hook_limit
        self.part: PartId | None = None  # the newest
        self.step: Step = "left"
        self._made = self._has_hook = False  # the role's object
        self._hooked: PartId | None = None  # for which `attached` runs
        self._hook_by = math.inf
        self._connected = False  # the supervisor knows that the newest part has met the others
        self._ran: PartId | None = None  # the newest part that the function ran for
        self._effects: list[Effect] = []

    def _batch(self) -> Batch:
        effects, self._effects = tuple(self._effects), []
        return Batch(effects, self._hook_by)

    # ---- orders

    def attach(self, attachment: Attachment) -> Batch:
        """The worker becomes a part of a generation."""
        self._leave("")
        self.begin(attachment)
        self._effects.append(Meet(attachment))
        return self._batch()

    def begin(self, attachment: Attachment) -> None:
        """The worker is to meet the others of the generation that it was started for."""
        self.part, self.step = PartId(attachment.generation, attachment.me.join), "meeting"
        self._connected = False

    def detach(self) -> Batch:
        """The worker leaves its generation, if it has one."""
        self._leave("")
        return self._batch()

    def _leave(self, problem: str) -> None:
        if self.part and self.step != "left":
            self.step, self._hook_by = "left", math.inf
            self._effects += [Leave(self.part), Report(Detached(*self.part, problem))]

    # ---- events

    def met(self, part: PartId, now: float) -> Batch:
        """The workers of `part` have met."""
        if part == self.part and self.step == "meeting":
            self.step = "met"
            if not self._made:  # its object may need its peers
                self._connect()
            self._introduce(now)
        return self._batch()

    def not_met(self, part: PartId, failure: Failure) -> Batch:
        """They could not meet. Once the part is over, that is nothing new."""
        over = part != self.part or self.step == "left"
        self._fall(part, failure, fails=not failure.lost and not over)
        return self._batch()

    def provided(self, now: float, *, hook: bool) -> Batch:
        """The role's object is made; it may have a method `attached`."""
        self._made, self._has_hook = True, hook
        self._introduce(now)
        return self._batch()

    def attached(self, part: PartId, now: float, failure: Failure | None = None) -> Batch:
        """`attached` has returned, or raised."""
        self._hooked = None
        if failure:
            self._fall(part, failure, fails=not failure.lost)
        elif part == self.part and self.step == "introduced":
            self._serve(part)
        self._introduce(now)
        return self._batch()

    def _fall(self, part: PartId, failure: Failure, *, fails: bool) -> None:
        """The part failed. A worker that stays waits for another one, unless it `fails`."""
        if fails or not self.stays:
            self._effects.append(Fail(failure.error))
        elif part == self.part:
            self._leave(failure.problem)

    def _introduce(self, now: float) -> None:
        """Lets peers call, once `attached` has run for this part. It runs once at a time."""
        if self.step != "met" or not self._made or self.part is None:
            return
        if not self._has_hook:
            self._serve(self.part)
        elif self._hooked is None:
            self.step, self._hooked, self._hook_by = "introduced", self.part, math.inf
            self._effects.append(CallAttached(self.part))
        else:
            self._hook_by = min(self._hook_by, now + self.hook_limit)

    def _serve(self, part: PartId) -> None:
        self.step = "serving"
        self._effects.append(Serve(part))
        self._connect()

    def _connect(self) -> None:
        if self.part and not self._connected:
            self._connected = True
            self._effects.append(Report(Connected(*self.part)))

    def tick(self, now: float) -> Batch:
        """Moves on to `now`."""
        if now >= self._hook_by:
            self._hook_by = math.inf
            limit = f"PHASE_TIMEOUT={self.hook_limit:g} s"
            problem = f"attached() of an earlier generation has not returned within {limit}"
            self._effects.append(Fail(RankError(problem)))
        return self._batch()

    # ---- the main thread

    def next_run(self) -> PartId | None:
        """The part that the role's function runs for now, once for each; None while there is none."""
        if self.step != "serving" or self.part == self._ran:
            return None
        self._ran = self.part
        return self.part

    def ran(self) -> None:
        """The function has returned. If it still ran as the worker became a part of another generation, it has run for
        that one too."""
        if self.step == "serving":
            self._ran = self.part
