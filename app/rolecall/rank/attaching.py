"""Makes a worker a part of generations, one at a time, and takes it out again, as its supervisor orders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from rolecall.context.context import Context
from rolecall.declare.task import Attachment
from rolecall.errors import RankError
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
        self._serve: Callable[[], None] | None = None  # lets peers call; None until the role's object is made
        self._attached: Hook | None = None  # of that object
        self._met: Session | None = None  # the newest whose workers have met
        self._admitted: Session | None = None  # the newest whose peers may call
        self._left: Session | None = None  # the newest that was left
        self._lock = threading.RLock()  # for those, and for what depends on them
        self._hook = threading.Lock()  # `attached` runs once at a time

    # ---- orders

    def attach(self, attachment: Attachment) -> None:
        """The worker becomes a part of a generation. Returns before it is one."""
        self.detach()
        session = self._context.group.begin(attachment)
        threading.Thread(target=self._attach, args=(session,), name="attach", daemon=True).start()

    def detach(self) -> None:
        """The worker leaves its generation, if it has one: nothing of that is executed or answered any more."""
        if session := self._context.group.session:
            self._leave(session)

    def _leave(self, session: Session, problem: str = "") -> None:
        with self._lock:
            if self._left is session:
                return
            self._left = session
            self._context.dispatcher.pause()
        session.end()
        self._supervision.report_detached(session.generation, session.join, problem)

    # ---- attaching

    def meet(self) -> None:
        """Meets the workers of the generation that this one was started for, in this thread."""
        assert self._context.group.session is not None
        self._meet(self._context.group.session)

    def _attach(self, session: Session) -> None:
        try:
            self._meet(session)
        except (Exception, SystemExit) as error:
            self._supervision.fail(error)

    def _meet(self, session: Session) -> None:
        try:
            self._connect(session)
        except Exception as error:
            if not self.stays or not (session.ended or is_lost(error)):
                raise
            self._leave(session, first_line(error))
            return
        with self._lock:
            if self._left is session:
                return
            self._met, is_made = session, self._serve is not None
            if not is_made:  # its object may need its peers
                self._supervision.report_connected(session.generation, session.join)
        if is_made:
            self._admit(session)

    def provide(self, serve: Callable[[], None], attached: Hook | None = None) -> None:
        """The role's object is there. For each part in a generation, `attached` is called, and then `serve`, which lets
        peers call it."""
        with self._lock:
            self._serve, self._attached, session = serve, attached, self._met
            is_reported = session is not None
        if session:
            self._admit(session, is_reported=is_reported)

    def _admit(self, session: Session, *, is_reported: bool = False) -> None:
        if self._attached and not self._call_attached(session, self._attached):
            return
        with self._lock:
            if self._left is session:
                return
            assert self._serve is not None
            self._admitted = session
            self._serve()
            if not is_reported:
                self._supervision.report_connected(session.generation, session.join)
        self._context.dispatcher.stop_turns()

    def _call_attached(self, session: Session, attached: Hook) -> bool:
        """Calls the method `attached`. Returns False if the worker has left the generation."""
        limit = self._context.settings.phase_timeout
        if not self._hook.acquire(timeout=limit):
            raise RankError(f"attached() of an earlier generation has not returned within PHASE_TIMEOUT={limit:g} s")
        try:
            with belongs_to(session):
                if not session.ended:
                    attached(self._context)
        except Exception as error:
            if not self.stays or not is_lost(error):
                raise
            self._leave(session, first_line(error))
        finally:
            self._hook.release()
        return not session.ended

    # ---- the main thread

    def run_forever(self, run: Callable[[], object] | None) -> NoReturn:
        """Calls `run` once for each part in a generation; if it still runs at the next one, it goes on. While it does
        not run, runs peers' calls of methods with `turn`."""
        ran: Session | None = None
        if run is None:
            self._context.watchdog.ready()
        while True:
            session = self._admitted
            if run is None or session is None or session is ran or session.ended:
                self._context.dispatcher.serve_turns()  # until there is another one
                continue
            ran = session
            try:
                run()
            except Exception as error:
                if not self.stays or not is_lost(error) or not self._is_over(session):
                    raise
            else:
                ran = self._admitted
                self._context.watchdog.ready()

    def _is_over(self, session: Session) -> bool:
        """Whether the generation has ended, or is about to: a lost peer may be the reason for it."""
        group = self._context.group
        return group.has_lost_rank0() or session.wait(self._context.settings.lease_seconds) or group.has_lost_rank0()
