"""Detects a worker that is stuck: in a phase, in a step, or before its training starts.

No I/O: the clock, in seconds, is passed in. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rolecall.record import pending_calls
from rolecall.record.pending_calls import PendingCall
from rolecall.record.recorder import recorder
from rolecall.wire.clock import now
from rolecall.wire.messages import Deadline

Phase = Literal["loading", "restoring", "compiling", "evaluating", "saving"]
RECENT_STEPS = 20  # steps that the next one is compared with
STUCK_FACTOR = 10  # a step is stuck only if it takes this many times as long as the longest of them
UNANSWERED_SECONDS = 10.0  # after which a call is told of
SUSPENDED_SECONDS = 2.0  # between two checks, which come every half second: this process was suspended


@dataclass(eq=False)
class PhaseEntry:
    """A phase under way: its name, when it began, and the thread that is in it."""

    name: Phase
    since: float
    thread: int


@functools.lru_cache(maxsize=64)
def _deadline(setting: str, seconds: float, phase_timeout: float, from_begin: bool, stuck: float = 0.0) -> Deadline:
    """A deadline of `seconds`, of `phase_timeout` for what comes before the call begins, and of `stuck` seconds for a
    method that runs."""
    return Deadline(
        seconds,
        f"{setting}={seconds:g}",
        wait=phase_timeout,
        wait_setting=f"PHASE_TIMEOUT={phase_timeout:g}",
        from_begin=from_begin,
        running=_deadline("STUCK_SECONDS", stuck, phase_timeout, True) if stuck > seconds else None,
    )


class Watchdog:
    """Tracks what one worker does and since when.

    A phase may take `phase_timeout` seconds. So may the first step, which may compile, and, with `limit_loading`, what
    comes before training or serving, which counts as loading. A later step is stuck after `stuck_seconds` if it also
    takes STUCK_FACTOR times as long as the longest of the last RECENT_STEPS. A step that waits for calls may take until
    their deadlines. `waiting` for a generation counts as nothing.
    """

    def __init__(
        self,
        phase_timeout: float,
        stuck_seconds: float,
        limit_loading: bool = True,
        clock: Callable[[], float] = now,
    ) -> None:
        self._phase_timeout, self._stuck_seconds = phase_timeout, stuck_seconds
        self._limit_loading, self._clock = limit_loading, clock
        self._lock = threading.Lock()
        self._phases: list[PhaseEntry] = []  # the oldest first
        self._ready = False  # loading is over
        self._waiting = 0  # threads that wait for a generation
        self._loops = False  # a loop calls `begin`; otherwise a step begins at the end of the one before
        self._step: int | None = None  # under way
        self._since = self._began = self._looked = self._awake = clock()
        self._seconds = deque[float](maxlen=RECENT_STEPS)  # of the last steps
        self._calls: set[PendingCall] = set()  # under way
        self._told: set[str] = set()  # methods whose calls were told of
        self._more_calls: list[Callable[[], list[PendingCall]]] = []
        self._began_ns = time.monotonic_ns()  # as `_began`, for the trace

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """The block is the phase `name`. A step under way is timed from the end of the phase."""
        entry = PhaseEntry(name, self._clock(), threading.get_ident())
        with self._lock:
            self._phases.append(entry)
        try:
            with recorder.span(name):
                yield
        finally:
            with self._lock:
                self._phases.remove(entry)
                self._since = self._began = self._clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for a generation, however long that takes."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                self._awake = self._clock()

    def ready(self) -> None:
        """Ends the loading that no phase declares."""
        if not self._ready:
            self._ready, self._since = True, self._clock()
            recorder.since(max(self._began_ns, recorder.started), "loading")  # a recording may begin after the process

    @property
    def doing(self) -> str:
        """The outermost phase; empty in a step, or in a rank that serves calls."""
        with self._lock:
            return self._phases[0].name if self._phases else "" if self._ready else "loading"

    # ---- steps

    def begin(self, step: int) -> None:
        """A loop begins `step`, perhaps once more."""
        self._loops = True
        self._begin(step)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The block is `step` of a loop. An exception that leaves the block, also that of a `break` out of a generator,
        ends the loop.
        """
        self.begin(step)
        try:
            with recorder.span("step", step=step):
                yield
        except BaseException:
            self.idle()
            raise

    def _begin(self, step: int) -> None:
        self.ready()
        self._step, self._since = step, self._clock()
        self._began, self._began_ns = self._since, time.monotonic_ns()

    def complete(self, step: int) -> None:
        """`step` was made. Without a loop that calls `begin`, the next one has begun."""
        if self._step is not None:
            self._seconds.append(self._clock() - self._began)
            if not self._loops:
                recorder.since(self._began_ns, "step", step=step)
        if self._step is not None or not self._loops:
            self._begin(step + 1)

    @property
    def usual_seconds(self) -> float | None:
        """The median of the recent steps; None if there are none."""
        return statistics.median(self._seconds) if self._seconds else None

    def idle(self) -> None:
        """No step is under way."""
        self._step = None

    # ---- calls

    def limit(self, timeout: float, rpc_timeout: float) -> Deadline:
        """The deadline of a call. `timeout` comes from the caller, and counts from the call. If it is -1, the deadline
        is `rpc_timeout`, or that of a phase if the caller is in one, and counts from when the method begins; outside a
        phase, a method that runs, as its peer says then, is stuck only after as long as a step. A call may wait as long
        as a phase for a peer that loads and, with -1, behind other calls.
        """
        if timeout == 0:
            return Deadline(0.0)
        if timeout > 0:
            return _deadline("timeout", timeout, self._phase_timeout, False)
        thread = threading.get_ident()
        with self._lock:
            in_phase = not self._ready or any(entry.thread == thread for entry in self._phases)
        if in_phase and self._phase_timeout > rpc_timeout:
            return _deadline("PHASE_TIMEOUT", self._phase_timeout, self._phase_timeout, True)
        setting, stuck = "RPC_TIMEOUT", self._stuck_seconds
        if stuck < rpc_timeout:  # it asks for less than a call has
            setting = f"STUCK_SECONDS={stuck:g} is below {setting}"
        return _deadline(setting, rpc_timeout, self._phase_timeout, True, stuck)

    def called(self, timeout: float, to: str = "", method: str = "") -> PendingCall:
        """A call of `method` at the peer `to` was sent, which ends within `timeout` seconds unless that is 0. Returns
        the argument for `answered`."""
        now = self._clock()
        call = PendingCall(to, method, now, now + timeout if timeout > 0 else 0.0)
        self._calls.add(call)
        return call

    def answered(self, call: PendingCall | None) -> None:
        """The call was answered, or has failed."""
        if call is not None:
            self._calls.discard(call)
        self._since = self._clock()

    def forget_calls(self) -> None:
        """The worker is a part of another generation: what it has called before does not count."""
        self._calls, self._told = set(), set()

    def unanswered(self) -> str:
        """Describes the calls with a deadline that have been unanswered for UNANSWERED_SECONDS, of each method once a
        generation; empty if there are none."""
        late = self._clock() - UNANSWERED_SECONDS
        calls = [call for call in [*self._calls] if call.since <= late and call.deadline and call.to]
        calls = sorted((call for call in calls if call.method not in self._told), key=lambda call: call.since)
        if not calls:
            return ""
        self._told |= {call.method for call in calls}
        more = f" and {len(calls) - 1} more calls" if len(calls) > 1 else ""
        first = calls[0]
        return f"{first.to}.{first.method}{more} unanswered for {UNANSWERED_SECONDS:.0f} s"

    def watch_calls(self, pending: Callable[[], list[PendingCall]]) -> None:
        """Includes calls that are not made by way of `called` in `long_calls`."""
        self._more_calls.append(pending)

    def long_calls(self) -> tuple[pending_calls.Reported, ...]:
        """The calls that have been under way for long."""
        more = [call for pending in self._more_calls for call in pending()]
        return tuple(pending_calls.report([*self._calls, *more], self._clock()))

    # ---- the check

    def check(self) -> str:
        """Describes what takes too long; empty if nothing does. Time in which this process was suspended does not
        count."""
        with self._lock:
            now = self._clock()
            if now - self._looked > SUSPENDED_SECONDS:
                self._awake = now
            self._looked = now
            if self._waiting:
                return ""
            if self._phases:
                return self._check_phase(self._phases[0].name, now - max(self._phases[0].since, self._awake))
            if any(call.deadline > now for call in [*self._calls]):
                return ""  # the deadline ends the wait
            seconds = now - max(self._since, self._awake)
            if not self._ready:
                return self._check_phase("loading", seconds) if self._limit_loading else ""
            return "" if self._step is None else self._check_step(self._step, seconds)

    def _check_phase(self, name: str, seconds: float) -> str:
        limit = self._phase_timeout
        return f"has been {name} for {seconds:.0f} s, over PHASE_TIMEOUT={limit:g}" if seconds > limit else ""

    def _check_step(self, step: int, seconds: float) -> str:
        limit, why = self._stuck_seconds, f"STUCK_SECONDS={self._stuck_seconds:g}"
        longest = max(self._seconds, default=0.0)
        if not self._seconds and self._phase_timeout > limit:
            limit, why = self._phase_timeout, f"PHASE_TIMEOUT={self._phase_timeout:g}, which the first step has"
        elif STUCK_FACTOR * longest > limit:
            limit = STUCK_FACTOR * longest
            why = f"{STUCK_FACTOR} times the longest of the last {len(self._seconds)} ({longest:.3g} s)"
        return f"step {step} has taken {seconds:.0f} s, over {why}" if seconds > limit else ""
