"""Whether the job makes progress, and how many generations, and how long, it may go on without any."""

from __future__ import annotations

from collections import Counter

from rolecall.errors import FAILED
from rolecall.gang.protocol import ORDERLY, OUT_OF_MEMORY, Budget, Cause, Event, Rules, Verdict

MOST_SEEN = 8  # kinds of ends that are remembered
MOST_TEXT = 160  # characters of each
SAME_STEP = 6  # ends in a row of one worker, killed at exactly the same step: the program itself does that
LOOP = 3  # fewest ends in which the time without progress counts: one long first step is none


def after_restart(budget: Budget, newest: int, killed: bool) -> Budget:
    """The budget of a new coordinator: that of the earlier one, unless the checkpoint of `newest` step is another than
    then. `killed` says that rank 0 was, in a generation: its container may be what runs out of memory."""
    if newest != budget.start:
        return Budget(newest, newest)
    if not killed:
        return budget
    what = "rank 0 was killed"
    seen = {**budget.seen, what: budget.seen.get(what, 0) + 1}
    return Budget(budget.step, budget.start, budget.fruitless + 1, budget.seconds, seen)


class Progress:
    """The newest step, what happened since then, and the time that a recovery takes. Times are in seconds."""

    def __init__(self, rules: Rules, budget: Budget, now: float) -> None:
        self._rules = rules
        self._step, self._start, self._fruitless = budget.step, budget.start, budget.fruitless
        self._seen = Counter(budget.seen)
        self._since = now - budget.seconds if budget.seen else None  # the first end without a step after it
        self._ended_at = now  # the last one
        self._failures: dict[int, str] = {}
        self._reached = 0  # the newest step of the generation under way
        self._same = ("", 0)  # how the last one ended, and at which step
        self._in_a_row = 0  # generations that ended so
        self._broken_at: float | None = None
        if (verdict := self.exhausted()) and not verdict.final:
            self._forget()
        self._pause_until = now + self._pause()

    def advance(self, step: int, now: float) -> list[Event]:
        """Takes the newest `step`; a new one clears what was counted. Returns the event, where it ends a recovery."""
        if step > self._step:
            self._failures.clear()
            self._forget()
        self._reached = max(self._reached, step)
        self._step = max(self._step, step)
        broken_at, self._broken_at = self._broken_at, None
        return [] if broken_at is None else [("recovered", {"seconds": now - broken_at})]

    def resumed(self, step: int) -> None:
        """A generation starts from the checkpoint of `step`: a newer one is progress too."""
        self._reached = max(self._reached, step)
        if step > self._start:
            self._start = step
            self._forget()

    def slept(self, seconds: float) -> None:
        """The coordinator was stopped for so long."""
        if self._since is not None:
            self._since += seconds

    def ended(self, cause: Cause, what: str, now: float) -> Verdict | None:
        """A generation ended, in which `what` was seen. Returns the job's verdict, if it fails."""
        if not self._rules.steps and self._since is not None and now - self._since > self._rules.progress_timeout:
            self._forget()  # such a job's steps are unknown: rare deaths do not add up
        self._broken_at = self._ended_at = now
        self._since = now if self._since is None else self._since
        what = what[:MOST_TEXT]
        if what in self._seen or len(self._seen) < MOST_SEEN:
            self._seen[what] += 1
        self._compare(cause, what)
        if cause not in ORDERLY:
            self._fruitless += 1
            self._pause_until = now + self._pause()
        return self.exhausted()

    def _compare(self, cause: Cause, what: str) -> None:
        """Counts the ends in a row in which one worker was killed at the same step, of those that made a step or
        started from a checkpoint: a kill from outside, or for lack of memory, comes at any."""
        here, self._reached = (what, self._reached), 0
        counts = cause == "killed" and here[1] > 0 and not _is_out_of_memory(what.partition("; ")[2])
        self._in_a_row = (self._in_a_row + 1 if here == self._same else 1) if counts else 0
        self._same = here

    def exhausted(self) -> Verdict | None:
        """The job's verdict if the budget is spent: with what was seen. One in which memory ran out does not hold for
        the next start, which may have more of it."""
        seconds = 0.0 if self._since is None else self._ended_at - self._since
        late = self._rules.steps and sum(self._seen.values()) >= LOOP and seconds > self._rules.progress_timeout
        certain = self._in_a_row >= SAME_STEP
        if self._fruitless < self._rules.max_restarts and not late and not certain:
            return None
        hints, ends = dict[str, None](), []
        for seen, count in self._seen.most_common(3):
            what, _, hint = seen.partition("; ")
            ends.append(f"{what} {count} times" if count > 1 else what)
            hints.update({hint: None} if hint else {})
        story = f"{', '.join(ends)} at step {self._step}{''.join(f'; {hint}' for hint in hints)}"
        story = f"no new step for {seconds:.0f} s: {story}" if late else story
        return Verdict(story, FAILED, final=not any(map(_is_out_of_memory, hints)))

    def failed(self, generation: int, reason: str) -> str | None:
        """A worker raised. Returns the first reason once `max_failures` generations have failed without progress."""
        self._failures.setdefault(generation, reason)
        return next(iter(self._failures.values())) if len(self._failures) >= self._rules.max_failures else None

    def missing(self, now: float) -> list[str]:
        """The pause that a start still waits for, in words."""
        if now >= self._pause_until:
            return []
        return [f"a pause after {self._fruitless} generations without a new step"]

    @property
    def pause_until(self) -> float:
        """When the next generation may start."""
        return self._pause_until

    @property
    def budget(self) -> Budget:
        """What has been spent, to be kept on disk."""
        seconds = 0.0 if self._since is None else self._ended_at - self._since
        return Budget(self._step, self._start, self._fruitless, seconds, dict(self._seen))

    def _forget(self) -> None:
        self._fruitless, self._since = 0, None
        self._seen.clear()

    def _pause(self) -> float:
        """None after the first end: exponential backoff from the second one on."""
        if self._fruitless < 2:
            return 0.0
        return min(2.0 ** min(self._fruitless - 2, 10), self._rules.longest_pause)


def _is_out_of_memory(hint: str) -> bool:
    """Whether the kernel has counted it: with a question mark, nobody knows."""
    return hint.startswith(OUT_OF_MEMORY) and not hint.endswith("?")
