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
        self._sessions = dict[PartId, Session]()
        self._lock = threading.Lock()  # for the parts and for what is to be done, in order
        self._effects = deque[parts.Effect]()
        self._performing = False
        self._timer: threading.Timer | None = None

    # ---- orders

    def attach(self, attachment: Attachment) -> None:
        """The worker becomes a part of a generation. Returns before it is one."""
        self._take(lambda now: self._parts.attach(attachment))

    def detach(self) -> None:
        """The worker leaves its generation, if it has one: nothing of that is executed or answered any more."""
        self._take(lambda now: self._parts.detach())

    # ---- what the parts decide

    def _take(self, event: Callable[[float], Batch]) -> None:
        """Does what follows from `event`, unless another thread is at it and will."""
        with self._lock:
            batch = event(time.monotonic())
            self._effects += batch.effects
            self._keep_time(batch.deadline)
            if self._performing:
                return
            self._performing = True
        while True:
            with self._lock:
                if not self._effects:
                    self._performing = False
                    return
                effect = self._effects.popleft()
            self._perform(effect)

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
                part = PartId(attachment.generation, attachment.me.join)
                self._sessions = {part: self._context.group.begin(attachment)}
                self._begin(self._meet, part)
            case parts.CallAttached(part):
                self._begin(self._call_attached, part)
            case parts.Serve():
                assert self._serve is not None
                self._serve()
                self._context.dispatcher.stop_turns()
            case parts.Leave(part):
                self._context.dispatcher.pause()
                if session := self._sessions.get(part):
                    session.end()
            case parts.Report(Connected(generation, join)):
                self._supervision.report_connected(generation, join)
            case parts.Report(Detached(generation, join, problem)):
                self._supervision.report_detached(generation, join, problem)
            case parts.Fail(error):
                self._supervision.fail(error)

    def _begin(self, work: Callable[[PartId], None], part: PartId) -> None:
        threading.Thread(target=work, args=(part,), name="attach", daemon=True).start()

    # ---- attaching

    def meet(self, attachment: Attachment) -> None:
        """Meets the workers of the generation that this one was started for, in this thread."""
        session = self._context.group.session
        assert session is not None
        with self._lock:
            part = self._parts.begin(attachment)
            self._sessions = {part: session}
        self._meet(part)

    def _meet(self, part: PartId) -> None:
        session = self._sessions.get(part)
        if session is None:
            return  # it has another part by now
        try:
            self._connect(session)
        except (Exception, SystemExit) as error:
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
        session, failure = self._sessions.get(part), None
        if session is None:
            return
        assert self._attached is not None
        try:
            with belongs_to(session):
                if not session.ended:
                    self._attached(self._context)
        except (Exception, SystemExit) as error:
            failure = Failure(error, first_line(error), lost=is_lost(error))
        self._take(lambda now: self._parts.attached(part, now, failure))

    # ---- the main thread

    def run_forever(self, run: Callable[[], object] | None) -> NoReturn:
        """Calls `run` once for each part in a generation; if it still runs at the next one, it goes on. While it does
        not run, runs peers' calls of methods with `turn`."""
        if run is None:
            self._context.watchdog.ready()
        while True:
            with self._lock:
                part = self._parts.next_run() if run else None
            if run is None or part is None:
                self._supervision.require_alive()
                self._context.dispatcher.serve_turns()  # until there is another one
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
        group, session = self._context.group, self._sessions.get(part)
        if session is None or group.has_lost_rank0():
            return True
        return session.wait(self._context.settings.lease_seconds) or group.has_lost_rank0()
