"""Ends calls that are late. Their peer is asked first which of them have begun: a deadline may run from then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from rolecall import telemetry
from rolecall.errors import CallError, CallTimeoutError, PeerLostError
from rolecall.wire.dispatch import Examined
from rolecall.wire.future import Future
from rolecall.wire.link import Pending
from rolecall.wire.messages import EXAMINE_SECONDS, Deadline, Request
from rolecall.wire.session import Session

CHECK_SECONDS = 0.2  # between two looks at the deadlines of pending calls


class Deadlines:
    """The thread that looks at the deadlines of the calls in `pending`, which the member `me` has made, until the end
    of `session`. What it does to them, the wire's: `call` makes one, `remove` takes one out, unless it has ended, `end`
    ends it with a value, an error and its bytes, `cancel` tells the peer, and `look` is called at each look."""

    def __init__(
        self,
        me: str,
        pending: dict[int, Pending],
        session: Session,
        *,
        call: Callable[..., Future[Any]],
        remove: Callable[[Pending], bool],
        end: Callable[[Pending, Any, Exception | None, int], None],
        cancel: Callable[[Pending], None],
        look: Callable[[], None],
    ) -> None:
        self._me, self._pending, self._session = me, pending, session
        self._call, self._remove, self._end, self._cancel, self._look = call, remove, end, cancel, look
        self._due = threading.Condition()  # a call with an early deadline was made
        self._next_check = float("inf")
        threading.Thread(target=self._check_forever, name="wire deadlines", daemon=True).start()

    def expect(self, expires: float) -> None:
        """A call was made whose deadline is at `expires`, in monotonic seconds."""
        if expires < self._next_check:
            self.wake()

    def wake(self) -> None:
        """Makes the thread look at once."""
        with self._due:
            self._due.notify()

    def _check_forever(self) -> None:
        while not self._session.ended:
            self._look()
            now = time.monotonic()
            pending = list(self._pending.values())
            expired: dict[str, list[Pending]] = {}
            for call in pending:
                if now >= call.expires:
                    call.expires = float("inf")  # until it is known what it does
                    expired.setdefault(call.to, []).append(call)
            for peer, calls in expired.items():  # whose frames may have to wait for a peer that does not read
                threading.Thread(target=self._end_late, args=(peer, calls), name="wire late", daemon=True).start()
            earliest = min((call.expires for call in pending if call.expires > now), default=float("inf"))
            wait = min(CHECK_SECONDS, max(0.0, earliest - now))
            self._next_check = now + wait
            with self._due:
                if not self._session.ended:
                    self._due.wait(wait)

    @staticmethod
    def late_error(call: Pending, *, begun: bool) -> CallTimeoutError:
        """The error of a late call, whose method has `begun` or not."""
        deadline, setting = call.deadline, call.deadline.setting
        seconds = float(deadline)
        if not begun and deadline.wait:
            seconds, setting = deadline + deadline.wait, deadline.wait_setting
        why = f"{setting}; it has not begun"
        if begun:
            why = f"{setting}; options(timeout=) gives it more" if deadline.from_begin else setting
        return CallTimeoutError(f"{call.to} has not answered {call.request.method} within {seconds:g} s ({why})")

    def _end_late(self, peer: str, calls: list[Pending]) -> None:
        """Calls are at their deadlines: ends those that are late. The peer is asked which of them have begun, and for
        the stacks of those."""
        direct = [call for call in calls if call.request.internal or call.link is None]
        ended = [call for call in direct if self._remove(call)]
        for call in ended:
            error = self.late_error(call, begun=True)
            unmade = PeerLostError(f"{error}: the connection to it is not made yet")
            self._end(call, None, error if call.link else unmade, 0)
        if asked := [call for call in calls if call not in direct]:
            examined = self.examine(peer, asked)
            late_calls: dict[tuple[str, bool], list[Pending]] = {}
            for place, call in enumerate(asked):
                if more := self.more_seconds(call, examined, place):
                    call.expires = time.monotonic() + more
                elif self._remove(call):
                    begun = examined is None or examined.running[place] is not None
                    late_calls.setdefault((call.request.method, begun), []).append(call)
            for (_, begun), each in late_calls.items():
                self._conclude(each, begun=begun, is_silent=examined is None)
                ended += each
        for call in ended:  # last, since the peer may not read
            self._cancel(call)

    def _ask(self, peer: str, question: Request) -> Any:
        """The answer to a question about a late call. Raises CallError at its deadline, also if it cannot be sent."""
        answer: Future[Any] = Future()
        threading.Thread(
            target=self._call,
            args=(peer, question, Deadline(EXAMINE_SECONDS), lambda value, error, _: answer.end(value, error)),
            kwargs={"urgent": True},
            daemon=True,
        ).start()
        return answer.result()  # bounded by that deadline

    def examine(self, peer: str, calls: list[Pending]) -> Examined | None:
        """What `peer` does with calls to it; None if it does not say."""
        question = Request("examine", (self._me, tuple(call.number for call in calls)), {}, 0.0, internal=True)
        try:
            return Examined(*self._ask(peer, question))
        except CallError:
            return None

    @staticmethod
    def more_seconds(call: Pending, examined: Examined | None, place: int) -> float:
        """What is left of a call's deadline; 0 if it is late."""
        deadline, waited = call.deadline, time.monotonic() - call.began
        running = examined.running[place] if examined else None
        if running is not None:
            return max(0.0, deadline - running) if deadline.from_begin or call.extended else 0.0
        assert call.link is not None
        is_loading = not (examined.served if examined else call.link.has_answered)
        if not (is_loading or (examined and deadline.from_begin)):
            return 0.0
        call.extended = True
        return max(0.0, min(float(deadline), deadline + deadline.wait - waited))

    def _conclude(self, calls: list[Pending], *, begun: bool, is_silent: bool) -> None:
        """Calls of a method at a peer are late: logs that, with the peer's stacks, and fails them: with a PeerLostError
        if the peer does not send its stacks either."""
        first, stacks = calls[0], None
        if not is_silent:
            question = Request("stacks", (first.request.method,), {}, EXAMINE_SECONDS, internal=True)
            with contextlib.suppress(CallError):
                stacks = self._ask(first.to, question)
        late: Exception = self.late_error(first, begun=begun)
        details = (
            {"exception": f"stacks of {first.to}:\n{stacks}"}
            if stacks
            else {"stacks": "none: the peer does not answer"}
        )
        if stacks is None:
            frozen = PeerLostError(f"{late}, nor sends its stacks: it is frozen or cut off")
            frozen.__cause__, late = late, frozen
        deadline, method = first.deadline, first.request.method
        telemetry.log().warning(
            "call timed out",
            peer=first.to,
            function=method,
            deadline_s=float(deadline),
            setting=deadline.setting,
            **details,
        )
        for call in calls:
            self._end(call, None, late, 0)
            if stacks is None and call.link and not call.sent:  # the caller is still sending it
                call.link.close(str(late))
