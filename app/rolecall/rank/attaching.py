"""Makes a worker a part of generations, one at a time, and takes it out again, as `WorkerParts` decides."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from rolecall.context.context import Context
from rolecall.declare.task import Attachment
from rolecall.life import parts
from rolecall.life.parts import Batch, Failure, PartId, WorkerParts
from rolecall.messages.worker import Connected, Detached
from rolecall.torch_rpc.failures import first_line, is_lost
from rolecall.wire.session import Session, belongs_to

Hook = Callable[[Any], object]


class Attacher:
    """The parts that the worker of `context` has in generations. `connect` meets the workers of a session.

    A worker that `stays` waits for another generation if a peer is lost with its own; another one fails.
    """

    def __init__(self, context: Context[Any], connect: Callable[[Session], None], *, stays: bool) -> None:
        self.stays = stays
        self._context, self._connect, self._supervision = context, connect, context.supervision
        self._parts = WorkerParts(stays=stays, hook_limit=context.settings.phase_timeout)
        self._serve: Callable[[], None] | None = None  # lets peers call; None until the role's object is made
        self._attached: Hook | None = None  # of that object
        self._lock = threading.Lock()  # for the parts and for what is to be done, in order
        self._effects = deque[parts.Effect]()
        self._performing = False
        self._idle = threading.Condition(self._lock)  # nothing is to be done
        self._timer: threading.Timer | None = None
        if attachment := context.group.newest:  # orders may come before it meets the others
            self._parts.begin(attachment)

    # ---- orders

    def attach(self, attachment: Attachment) -> None:
        """The worker becomes a part of a generation. Returns before it is one, and once it has begun to meet the
        others: the orders that follow are for that generation."""
        self._take(lambda now: self._parts.attach(attachment), wait=True)

    def detach(self) -> None:
        """The worker leaves its generation, if it has one: nothing of that is executed or answered any more."""
        self._take(lambda now: self._parts.detach(), wait=True)

    # ---- what the parts decide

    def _take(self, event: Callable[[float], Batch], *, wait: bool = False) -> None:
        """Does what follows from `event`, unless another thread is at it and will: perhaps waits until it has."""
        with self._lock:
            batch = event(time.monotonic())
            self._effects += batch.effects
            self._keep_time(batch.deadline)
            if self._performing:
                if wait:
                    self._idle.wait_for(lambda: not self._performing, self._context.settings.phase_timeout)
                return
            self._performing = True
        while True:
            with self._lock:
                if not self._effects:
                    self._performing = False
                    self._idle.notify_all()
                    return
                effect = self._effects.popleft()
            try:
                self._perform(effect)
            except (Exception, SystemExit) as error:
                self._supervision.fail(error)

    def _keep_time(self, deadline: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if deadline < math.inf:
            self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._take, (self._parts.tick,))
            self._timer.daemon = True
            self._timer.start()

    def _perform(self, effect: parts.Effect) -> None:
        match effect:
            case parts.Meet(attachment):
                self._context.group.begin(attachment)
                self._begin(self._meet, PartId(attachment.generation, attachment.me.join))
            case parts.CallAttached(part):
                self._begin(self._call_attached, part)
            case parts.Serve():
                assert self._serve is not None
                self._serve()
                self._context.dispatcher.stop_turns()
            case parts.Leave(part):
                self._context.dispatcher.pause()
                if session := self._session(part):
                    session.end()
            case parts.Report(Connected(generation, join)):
                self._supervision.report_connected(generation, join)
            case parts.Report(Detached(generation, join, problem)):
                self._supervision.report_detached(generation, join, problem)
            case parts.Fail(error):
                self._supervision.fail(error)

    def _begin(self, work: Callable[[PartId], None], part: PartId) -> None:
        threading.Thread(target=work, args=(part,), name="attach", daemon=True).start()

    def _session(self, part: PartId) -> Session | None:
        """The session of `part`; None if the worker has another part by now."""
        session = self._context.group.session
        return session if session and part == (session.generation, session.join) else None

    # ---- attaching

    def meet(self, attachment: Attachment) -> None:
        """Meets the workers of the generation that this one was started for, in this thread."""
        self._meet(PartId(attachment.generation, attachment.me.join))

    def _meet(self, part: PartId) -> None:
        session = self._session(part)
        if session is None:
            return
        try:
            self._connect(session)
        except BaseException as error:  # such as asyncio's CancelledError
            failure = Failure(error, first_line(error), lost=is_lost(error))
            self._take(lambda now: self._parts.not_met(part, failure))
        else:
            self._take(lambda now: self._parts.met(part, now))

    def provide(self, serve: Callable[[], None], attached: Hook | None = None) -> None:
        """The role's object is there. For each part in a generation, `attached` is called, and then `serve`, which lets
        peers call it."""
        self._serve, self._attached = serve, attached
        self._take(lambda now: self._parts.provided(now, hook=attached is not None))

    def _call_attached(self, part: PartId) -> None:
        """Calls the method `attached`."""
        session, failure = self._session(part), None
        assert self._attached is not None
        try:
            if session and not session.ended:
                with belongs_to(session):
                    self._attached(self._context)
        except BaseException as error:
            failure = Failure(error, first_line(error), lost=is_lost(error))
        self._take(lambda now: self._parts.attached(part, now, failure))

    # ---- the main thread

    def next_run(self) -> PartId:
        """Waits for a part in a generation that `run` was not called for, and that peers may call. Meanwhile it runs
        peers' calls of methods with `turn`."""
        while True:
            with self._lock:
                if part := self._parts.next_run():
                    return part
            self._supervision.require_alive()
            self._context.dispatcher.serve_turns()  # until there is another one

    def run_forever(self, run: Callable[[], object] | None) -> NoReturn:
        """Calls `run` once for each part in a generation; if it still runs at the next one, it goes on."""
        if run is None:
            self._context.watchdog.ready()
        while True:
            part = self.next_run()
            if run is None:
                continue
            try:
                run()
            except Exception as error:
                if not self.stays or not is_lost(error) or not self._is_over(part):
                    raise
            else:
                with self._lock:
                    self._parts.ran()
                self._context.watchdog.ready()

    def _is_over(self, part: PartId) -> bool:
        """Whether the generation has ended, or is about to: a lost peer may be the reason for it."""
        group, session = self._context.group, self._session(part)
        if session is None or group.has_lost_rank0():
            return True
        return session.wait(self._context.settings.lease_seconds) or group.has_lost_rank0()
