"""The restart budget: how many failures, and how many generations without progress, the job may have."""

from __future__ import annotations

from collections import Counter

from rolecall.errors import FAILED
from rolecall.gang.protocol import KILLED, ORDERLY, OUT_OF_MEMORY, Budget, Cause, Event, Rules, Verdict

MAX_REMEMBERED_ENDS = 8  # different ends of generations
MAX_END_CHARACTERS = 160
MAX_SAME_STEP_KILLS = 6  # kills in a row of one worker at exactly the same step: the program itself does that
MAX_SAME_MISTAKES = 2  # in a row
# errors of a program that the outside, such as a disk or a network, does not cause
MISTAKES = (
    "Attribute",
    "Import",
    "Index",
    "Key",
    "ModuleNotFound",
    "Name",
    "NotImplemented",
    "Type",
    "UnboundLocal",
    "_pickle.Pickling",
)
MIN_ENDS_FOR_TIMEOUT = 3  # fewer ends are no loop: the first step may be a long one


def after_restart(budget: Budget, newest: int, killed: bool) -> Budget:
    """The budget of a new coordinator: the earlier one's, or an unspent one if the checkpoint of `newest` step is
    another than then. `killed`: rank 0 was killed in a generation, maybe because its container ran out of memory."""
    if newest != budget.start:
        return Budget(newest, newest)
    if not killed:
        return budget
    end = "rank 0 was killed"
    seen = {**budget.seen, end: budget.seen.get(end, 0) + 1}
    return Budget(budget.step, budget.start, budget.fruitless + 1, budget.seconds, seen)


class RestartBudget:
    """Counts failures, and generations without progress. Progress is a new step, or a start from a newer checkpoint.
    Also measures the time of a recovery."""

    def __init__(self, rules: Rules, budget: Budget, now: float) -> None:
        self._rules = rules
        self._step, self._start, self._fruitless = budget.step, budget.start, budget.fruitless
        self._seen = Counter(budget.seen)  # how generations ended
        self._since = now - budget.seconds if budget.seen else None  # the first end without a step after it
        self._ended_at = now
        self._failures: dict[int, str] = {}
        self._last_mistake, self._same_mistakes = "", 0  # of the generations that failed in a row
        self._reached = 0  # the newest step of the generation under way
        self._last_end = ("", 0)  # how the last generation ended, and at which step
        self._same_step_kills = 0
        self._broken_at: float | None = None
        if (verdict := self.exhausted()) and not verdict.final:
            self._forget()
        self.pause_until = now + self._pause()  # when the next generation may start

    def advance(self, step: int, now: float) -> list[Event]:
        """Takes the newest `step`. Returns the event, if the step ends a recovery."""
        if step > self._step:
            self._failures.clear()
            self._last_mistake = ""
            self._forget()
        self._reached = max(self._reached, step)
        self._step = max(self._step, step)
        broken_at, self._broken_at = self._broken_at, None
        return [] if broken_at is None else [Event("recovered", seconds=now - broken_at)]

    def resumed(self, step: int) -> None:
        """A generation starts from the checkpoint of `step`."""
        self._reached = max(self._reached, step)
        if step > self._start:
            self._start = step
            self._forget()

    def slept(self, seconds: float) -> None:
        """The coordinator was suspended, or a member debugged, for `seconds`, which do not count."""
        if self._since is not None:
            self._since += seconds

    def ended(self, cause: Cause, end: str, now: float) -> Verdict | None:
        """A generation ended, as `end` says. Returns the job's verdict, if it fails."""
        if not self._rules.steps and self._since is not None and now - self._since > self._rules.progress_timeout:
            self._forget()  # such a job's steps are unknown: rare deaths do not add up
        self._broken_at = self._ended_at = now
        self._since = now if self._since is None else self._since
        end = end[:MAX_END_CHARACTERS]
        if end in self._seen or len(self._seen) < MAX_REMEMBERED_ENDS:
            self._seen[end] += 1
        self._compare(cause, end)
        if cause not in ORDERLY:
            self._fruitless += 1
            self.pause_until = now + self._pause()
        return self.exhausted()

    def _compare(self, cause: Cause, end: str) -> None:
        """Counts kills in a row of one worker at the same step; before a first step, and without a checkpoint, only
        those by SIGKILL while the kernel has counted none. A kill from outside, or for lack of memory, comes at any
        step."""
        this_end, self._reached = (end, self._reached), 0
        before_any = self._rules.steps and end.endswith(KILLED)
        is_its_own = not _is_out_of_memory(end.partition("; ")[2]) if this_end[1] else before_any
        counts = cause == "killed" and is_its_own
        self._same_step_kills = (self._same_step_kills + 1 if this_end == self._last_end else 1) if counts else 0
        self._last_end = this_end

    def exhausted(self) -> Verdict | None:
        """The job's verdict, if the budget is spent. A verdict of memory that ran out is not final: the next start may
        have more memory."""
        seconds = self.spent.seconds
        ends = sum(self._seen.values())
        late = self._rules.steps and ends >= MIN_ENDS_FOR_TIMEOUT and seconds > self._rules.progress_timeout
        same_step = self._same_step_kills >= MAX_SAME_STEP_KILLS
        if self._fruitless < self._rules.max_restarts and not late and not same_step:
            return None
        hints, texts = dict[str, None](), []
        for seen, count in self._seen.most_common(3):
            end, _, hint = seen.partition("; ")
            texts.append(f"{end} {count} times" if count > 1 else end)
            hints.update({hint: None} if hint else {})
        story = f"{', '.join(texts)} at step {self._step}{''.join(f'; {hint}' for hint in hints)}"
        story = f"no new step for {seconds:.0f} s: {story}" if late else story
        return Verdict(story, FAILED, final=not any(map(_is_out_of_memory, hints)))

    def failed(self, generation: int, reason: str) -> str | None:
        """A worker raised. Returns the first reason once `max_failures` generations have failed without progress, or
        the reason of MAX_SAME_MISTAKES in a row by one mistake at one line."""
        if generation not in self._failures:
            repeats = self._last_mistake == (mistake := _mistake_in(reason)) != ""
            self._last_mistake, self._same_mistakes = mistake, self._same_mistakes + 1 if repeats else 1
        self._failures.setdefault(generation, reason)
        if self._last_mistake and self._same_mistakes >= MAX_SAME_MISTAKES:
            return self._failures[generation]
        return next(iter(self._failures.values())) if len(self._failures) >= self._rules.max_failures else None

    def missing(self, now: float) -> list[str]:
        """The pause that a start still waits for, in words."""
        return [f"a pause after {self._fruitless} generations without a new step"] if now < self.pause_until else []

    @property
    def spent(self) -> Budget:
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
    """Whether the kernel has counted it; a question mark says that nobody knows."""
    return hint.startswith(OUT_OF_MEMORY) and not hint.endswith("?")


def _mistake_in(reason: str) -> str:
    """The traceback in `MEMBER: TRACEBACK`, if what it ends with is one of MISTAKES; otherwise nothing."""
    traceback = reason.partition(": ")[2].rstrip()
    kind = traceback.rpartition("\n")[2].partition(":")[0].removesuffix("Error")
    return traceback if kind in MISTAKES else ""
