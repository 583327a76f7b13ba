"""What a worker is doing, since when, and whether that takes too long: a phase, a step, or calls that it waits for.

No I/O: the clock, in seconds, is passed in. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rolecall.record import pending_calls
from rolecall.record.pending_calls import PendingCall
from rolecall.record.recorder import recorder

Phase = Literal["loading", "restoring", "compiling", "evaluating", "saving"]
RECENT = 20  # steps that the next one is compared with
SLOWER = 10  # times the longest of them
PAUSE = 2.0  # seconds between two looks after which this process was suspended; the beat looks every half second
F = TypeVar("F", bound=Callable[..., Any])


class Deadline(float):
    """A call's deadline in seconds, 0 for none; `setting` says where it comes from."""

    setting: str

    def __new__(cls, seconds: float, setting: str = "") -> Deadline:
        """The deadline in `seconds` that `setting` has."""
        self = super().__new__(cls, seconds)
        self.setting = setting
        return self


@dataclass(eq=False)
class Entry:
    """A phase under way: its name, when it began, and the thread that is in it."""

    name: Phase
    since: float
    thread: int


class Pace:
    """The account of one worker, of rank 0 where it is the `first`.

    A phase is bounded by `phase_timeout` seconds. So is what rank 0 does before its training starts, which counts as
    loading, and its first step, which may compile. A later step is stuck after `stuck_seconds` seconds, if it also
    takes `SLOWER` times as long as the longest of the last ones. A step that waits for calls has until their deadlines.
    """

    def __init__(
        self,
        phase_timeout: float,
        stuck_seconds: float,
        first: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase_timeout, self._stuck_seconds, self._first, self._clock = phase_timeout, stuck_seconds, first, clock
        self._lock = threading.Lock()
        self._phases: list[Entry] = []  # the oldest first
        self._ready = False  # it is no longer loading
        self._loops = False  # `begin` says when a step begins; otherwise it does where the one before ends
        self._step: int | None = None  # under way
        self._since = self._began = self._looked = self._awake = clock()
        self._seconds = deque[float](maxlen=RECENT)  # of the last steps
        self._calls: set[PendingCall] = set()  # under way
        self.other_calls: Callable[[], list[PendingCall]] = list  # those that do not go by way of `called`
        self._answered: set[str] = set()  # peers
        self._began_ns = time.monotonic_ns()  # as `_began`, for the trace

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """The block is the phase `name`. A step under way is timed from its end."""
        entry = Entry(name, self._clock(), threading.get_ident())
        with self._lock:
            self._phases.append(entry)
        try:
            with recorder.span(name):
                yield
        finally:
            with self._lock:
                self._phases.remove(entry)
                self._since = self._began = self._clock()

    def ready(self) -> None:
        """What counts as loading without being said is over."""
        if not self._ready:
            self._ready, self._since = True, self._clock()
            recorder.since(self._began_ns, "loading")

    @property
    def doing(self) -> str:
        """The phase, the outermost of several; empty for a step, or a rank that serves calls."""
        with self._lock:
            return self._phases[0].name if self._phases else "" if self._ready else "loading"

    # ---- steps

    def begin(self, step: int) -> None:
        """A loop begins `step`, perhaps once more."""
        self._loops = True
        self._begin(step)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The block is `step` of a loop, which ends where the block is left by an exception, such as that of a `break`
        out of a generator.
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
        """`step` was made. Where no loop says when one begins, the next has begun."""
        if self._step is not None:
            self._seconds.append(self._clock() - self._began)
            if not self._loops:
                recorder.since(self._began_ns, "step", step=step)
        if self._step is not None or not self._loops:
            self._begin(step + 1)

    def idle(self) -> None:
        """No step is under way."""
        self._step = None

    # ---- calls

    def limit(self, to: str, timeout: float, rpc_timeout: float) -> Deadline:
        """The deadline of a call to the peer `to`. `timeout` is what its caller gives, -1 for nothing: then it is
        `rpc_timeout`, or a phase's if the caller is in one. A peer that has answered no call yet may be loading, and
        has a phase more.
        """
        if timeout == 0:
            return Deadline(0.0)
        phase, setting = f"PHASE_TIMEOUT={self._phase_timeout:g}", f"timeout={timeout:g}"
        if timeout < 0:
            timeout, setting = rpc_timeout, f"RPC_TIMEOUT={rpc_timeout:g}"
            thread = threading.get_ident()
            with self._lock:
                in_phase = not self._ready or any(entry.thread == thread for entry in self._phases)
            if in_phase and self._phase_timeout > timeout:
                timeout, setting = self._phase_timeout, phase
        if to in self._answered:
            return Deadline(timeout, setting)
        return Deadline(timeout + self._phase_timeout, f"{setting} and, for its start, {phase}")

    def called(self, timeout: float, to: str = "", method: str = "") -> PendingCall:
        """A call of `method` at the peer `to`, with a deadline in `timeout` seconds unless that is 0, was sent; returns
        what `answered` wants."""
        now = self._clock()
        call = PendingCall(to, method, now, now + timeout if timeout > 0 else 0.0)
        self._calls.add(call)
        return call

    def answered(self, token: PendingCall | None, peer: str = "") -> None:
        """The call has its answer, from `peer`, or has failed."""
        if token is not None:
            self._calls.discard(token)
        self._since = self._clock()
        if peer:
            self._answered.add(peer)

    def long_calls(self) -> list[pending_calls.Reported]:
        """The calls that have been under way for long."""
        return pending_calls.report([*self._calls, *self.other_calls()], self._clock())

    # ---- the judge

    def judge(self) -> str:
        """What takes too long, in words; nothing where all is well. A pause of this process is forgiven."""
        with self._lock:
            now = self._clock()
            if now - self._looked > PAUSE:
                self._awake = now
            self._looked = now
            if self._phases:
                return self._judge_phase(self._phases[0].name, now - max(self._phases[0].since, self._awake))
            if any(call.deadline > now for call in [*self._calls]):
                return ""  # whoever does not answer is given up then
            seconds = now - max(self._since, self._awake)
            if not self._ready:
                return self._judge_phase("loading", seconds) if self._first else ""
            return "" if self._step is None else self._judge_step(self._step, seconds)

    def _judge_phase(self, name: str, seconds: float) -> str:
        limit = self._phase_timeout
        return f"has been {name} for {seconds:.0f} s, over PHASE_TIMEOUT={limit:g}" if seconds > limit else ""

    def _judge_step(self, step: int, seconds: float) -> str:
        limit, why = self._stuck_seconds, f"STUCK_SECONDS={self._stuck_seconds:g}"
        longest = max(self._seconds, default=0.0)
        if not self._seconds and self._phase_timeout > limit:
            limit, why = self._phase_timeout, f"PHASE_TIMEOUT={self._phase_timeout:g}, which the first step has"
        elif SLOWER * longest > limit:
            limit, why = (
                SLOWER * longest,
                f"{SLOWER} times the longest of the last {len(self._seconds)} ({longest:.3g} s)",
            )
        return f"step {step} has taken {seconds:.0f} s, over {why}" if seconds > limit else ""


def in_phase(name: Phase) -> Callable[[F], F]:
    """Has a method of a context be the phase `name`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def phased(self: Any, *args: Any, **values: Any) -> Any:
            with self.phase(name):
                return method(self, *args, **values)

        return phased  # type: ignore[return-value]

    return decorate
