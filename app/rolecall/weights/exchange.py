"""Keeps a process's copies of a name up to date: tells rank 0 what is here, and pulls what is newer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rolecall.errors import CallError
from rolecall.telemetry import log
from rolecall.weights import plan as plans
from rolecall.weights.copies import Absent, Copies, Version
from rolecall.weights.manifest import Entry, Manifest, VersionId, digests_of
from rolecall.weights.plan import Plan
from rolecall.weights.registry import Member, Offer
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request
from rolecall.wire.session import Session

POLL_SECONDS = 30.0  # for which rank 0 is asked for a newer version at a time
ANSWER_SECONDS = 30.0  # for any other answer, beyond what the peer waits
CHUNKS_SECONDS = 20.0  # for which a peer waits for chunks that it is to get
RETRY_SECONDS = 1.0  # after a pull that nobody could serve
LOOK_SECONDS = 0.25  # between two looks at sources that do not answer
VAIN_OFFERS = 4  # of one version that nobody has, after which a line tells it
SESSION_SECONDS = 60.0  # of one wait for a generation


class Connection(NamedTuple):
    """A member's part in a generation, while it can call its peers; `call` is not watched as a part of a step."""

    session: Session
    me: Member
    rank0: str
    call: Callable[[str, Request, Deadline], Future[Any]]

    def ask(self, to: str, method: str, *args: Any, wait: float = 0.0) -> Future[Any]:
        """Calls one of the services for weights of the peer `to`, which may wait so long before it answers."""
        seconds = ANSWER_SECONDS + wait
        return self.call(to, Request(method, args, {}, seconds, internal=True), Deadline(seconds))


class PendingVersion(NamedTuple):
    """A publication without digests and identity."""

    version: int
    entries: tuple[Entry, ...]
    buffer: np.ndarray
    full_nbytes: int


class _Answer(NamedTuple):
    request: plans.Request
    chunks: list[int]
    value: Any
    error: BaseException | None


class Exchange:
    """A thread of its own for one name, as long as the process lives. `connect` waits up to some seconds for a
    generation. Newer versions of others are pulled once `subscribe` was called."""

    def __init__(self, copies: Copies, connect: Callable[[float], Connection | None], metrics: Any) -> None:
        self.copies = copies
        self._connect, self._metrics = connect, metrics
        self._pending: PendingVersion | None = None  # the newest publication, until it is a version
        self._reads = False
        self._gone: tuple[VersionId | None, int] = (None, 0)  # the version that nobody had, and how often in a row
        threading.Thread(target=self._run, name=f"weights {copies.name}", daemon=True).start()

    def publish(self, pending: PendingVersion) -> None:
        """`pending` becomes the newest version, unless another one follows at once."""
        with self.copies.changed:
            self._pending = pending
            self.copies.changed.notify_all()

    def subscribe(self) -> None:
        """Newer versions are pulled from now on."""
        with self.copies.changed:
            self._reads = True
            self.copies.changed.notify_all()

    # ---- the thread

    def _run(self) -> None:
        session: Session | None = None
        while True:
            connection = self._connect(SESSION_SECONDS)
            if connection is None:
                continue
            if connection.session is not session:
                session = connection.session
                session.on_end(self.copies.notify)
            try:
                self._serve(connection)
            except Exception as error:  # CallError, or no memory; without this thread, nothing would ever arrive
                if not connection.session.wait(RETRY_SECONDS):
                    log().warning("weights", name=self.copies.name, problem=str(error) or type(error).__name__)

    def _complete_pending(self, connection: Connection) -> None:
        pending = self._pending
        if pending is None:
            return
        digests = digests_of(memoryview(pending.buffer))  # type: ignore[arg-type]  # numpy's stubs know no buffers
        number = connection.ask(connection.rank0, "weights_number", self.copies.name).result()
        version_id = VersionId(connection.session.generation, number, connection.me[0])
        manifest = Manifest(
            version_id,
            version=pending.version,
            entries=pending.entries,
            nbytes=pending.buffer.nbytes,
            full_nbytes=pending.full_nbytes,
            digests=digests,
        )
        with self.copies.changed:
            if self._pending is pending:
                self._pending = None
        self._add(Version(manifest, pending.buffer, complete=True))

    def _add(self, version: Version) -> None:
        self.copies.add(version)
        if newest := self.copies.newest:
            self._metrics.weights_version.labels(self.copies.name).set(newest.manifest.version)

    def _serve(self, connection: Connection) -> None:
        """Does what there is to do until the session ends."""
        copies, session = self.copies, connection.session
        told: tuple[VersionId | None, bool] | None = None
        offered: Future[Offer | None] | None = None
        after: VersionId | None = None  # that the question is for
        while not session.ended:
            self._complete_pending(connection)
            newest, reads = copies.newest, self._reads
            version_id = newest.version_id if newest else None
            if told != (version_id, reads) and (version_id or reads):
                told = (version_id, reads)
                connection.ask(connection.rank0, "weights_tell", copies.name, connection.me, *told).result()
            if offered is not None and (offered.done() or after != version_id):
                offer = offered.result() if offered.done() else None
                if not offered.done():
                    offered.cancel()
                offered = None
                if offer is not None and (version_id is None or offer.version_id > version_id):
                    self._pull(connection, offer)
                    continue
            if reads and offered is None:
                after = version_id
                question = (copies.name, version_id, POLL_SECONDS)
                offered = connection.ask(connection.rank0, "weights_newer", *question, wait=POLL_SECONDS)
                offered.then(lambda _: copies.notify())

            def is_news(offered: Future[Any] | None = offered, before: Any = (newest, reads)) -> bool:
                done = offered is not None and offered.done()
                return done or session.ended or self._pending is not None or before != (copies.newest, self._reads)

            copies.wait(is_news, copies.drop_old() or SESSION_SECONDS)

    # ---- pulling

    def _pull(self, connection: Connection, offer: Offer) -> None:
        """Pulls a version. It goes on if a newer one is published meanwhile: otherwise a publisher that is faster than
        the network would keep every pull from its end. Raises CallError if nobody can serve it."""
        started, copies, me = time.monotonic(), self.copies, connection.me[0]
        manifest = self._manifest(connection, offer)
        if manifest is None:  # as a rule, a newer one has taken its place, which the next offer names
            version_id, times = self._gone
            self._gone = (offer.version_id, times + 1 if version_id == offer.version_id else 1)
            if self._gone[1] == VAIN_OFFERS:
                raise CallError(f"weights {copies.name!r}: no member has the newest version any more")
            connection.session.wait(LOOK_SECONDS)
            return
        version = copies.begin(manifest)
        cells = sorted({chunk // plans.CELL_CHUNKS for chunk in range(manifest.chunks) if not version.has[chunk]})
        received = self._fill(connection, version, Plan(me, cells, offer.holders, offer.readers))
        self._add(version)
        self._metrics.weights_saved_bytes.labels(copies.name).inc(max(0, manifest.full_nbytes - received))
        self._metrics.weights_seconds.labels(copies.name).observe(time.monotonic() - started)

    def _fill(self, connection: Connection, version: Version, plan: Plan) -> int:
        """Pulls what the plan says. Returns the bytes that came. Raises CallError."""
        answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        received, counter = 0, self._metrics.weights_bytes.labels(self.copies.name)
        while plan.missing:
            self._complete_pending(connection)
            for cell in plan.take_direct():
                for chunk in _chunks(version, cell):
                    version.direct[chunk] = 1
            for request in plan.next(time.monotonic()):
                self._request(connection, version, request, answers)
            try:
                answer = answers.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if connection.session.ended:
                    raise connection.session.error() from None
                plan.look(time.monotonic())
            else:
                nbytes = self._take(version, plan, answer)
                received += nbytes
                counter.inc(nbytes)
            if plan.hopeless:
                which = f"version {version.manifest.version}"
                raise CallError(f"weights {self.copies.name!r}: no member can send {which} any more")
        return received

    def _manifest(self, connection: Connection, offer: Offer) -> Manifest | None:
        """The manifest of what is offered; None if no holder has it any more. Raises CallError if one of them fails."""
        error: CallError | None = None
        turn = offer.readers.index(connection.me[0]) if connection.me[0] in offer.readers else 0
        for number in range(len(offer.holders)):
            holder = offer.holders[(number + turn) % len(offer.holders)]
            try:
                manifest = connection.ask(holder, "weights_manifest", self.copies.name, offer.version_id).result()
            except CallError as problem:
                error = problem
                continue
            if isinstance(manifest, Manifest):
                return manifest
        if error:
            raise error
        return None

    def _request(
        self, connection: Connection, version: Version, request: plans.Request, answers: queue.SimpleQueue[_Answer]
    ) -> None:
        chunks = [chunk for chunk in _chunks(version, request.cell) if not version.has[chunk]]
        arguments = (self.copies.name, version.version_id, chunks, CHUNKS_SECONDS)
        future = connection.ask(request.source, "weights_chunks", *arguments, wait=CHUNKS_SECONDS)

        def answered(future: Any) -> None:
            error = future.exception()
            answers.put(_Answer(request, chunks, None if error else future.result(), error))

        future.then(answered)

    def _take(self, version: Version, plan: Plan, answer: _Answer) -> int:
        """Takes an answer. Returns the bytes that it had."""
        (source, cell), now = answer.request, time.monotonic()
        if answer.error is not None or answer.value is Absent.GONE:
            plan.lost(source)
            return 0
        if answer.value is Absent.NOT_AVAILABLE:
            plan.refused(source, cell, now)
            return 0
        contents = [memoryview(each) for each in answer.value]
        wrong = self.copies.put(version, answer.chunks, contents)
        if wrong:
            log().warning("weights", name=self.copies.name, problem=f"{source} sent {wrong} chunks with other digests")
            plan.refused(source, cell, now)
        else:
            plan.came(source, cell, now)
        return sum(each.nbytes for each in contents)


def _chunks(version: Version, cell: int) -> range:
    """The chunks of a cell."""
    start = cell * plans.CELL_CHUNKS
    return range(start, min(start + plans.CELL_CHUNKS, version.manifest.chunks))
