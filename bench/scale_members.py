"""Many members in one process, for `make bench-scale`: the real `Member` and its messages, over HTTP, with a worker
that does what it is told at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from bench.scale_coordinator import FIRST, describe
from rolecall.config import Settings
from rolecall.gang.member import RETRY_SECONDS, Action, Batch, Member, Request
from rolecall.gang.protocol import Answer, Directive, Heartbeat, Rules, WorkerState, WorkerStatus
from rolecall.messages.codec import decode, encode
from rolecall.tunnel.rank0 import HEARTBEAT_PATH

AT_ONCE = 100  # members that join at the same time
IDLE = WorkerStatus()


class Connection(asyncio.Protocol):
    """HTTP/1.1 with as little effort as possible: what is measured is the other side."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._buffer = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
        if end and len(body) >= length:
            self._buffer = b""
            if self._answer and not self._answer.done():
                if head.startswith(b"HTTP/1.1 200 "):
                    self._answer.set_result(body)
                else:
                    self._answer.set_exception(RuntimeError(f"the coordinator answers {self._buffer!r} {body!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed by the coordinator"))

    def post(self, body: bytes) -> asyncio.Future[bytes]:
        """The body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(b"POST %b HTTP/1.1\r\nHost: rank-0\r\nContent-Type: application/json\r\n"
                              b"Content-Length: %d\r\n\r\n%b" % (HEARTBEAT_PATH.encode(), len(body), body))  # fmt: skip
        return self._answer

    def close(self) -> None:
        if self._answer:
            self._answer.cancel()  # nobody waits for it any more
        self._transport.close()


class Speaker:
    """Speaks for one member: its supervisor without a process behind it."""

    def __init__(self, crowd: Crowd, role: str, ordinal: int, first: bool) -> None:
        self.crowd, self.first = crowd, first
        self.key = role, ordinal
        incarnation = FIRST if first else f"{role}-{ordinal:09d}"
        shared = crowd.agreement
        me = Heartbeat(
            role,
            ordinal,
            incarnation,
            sequence=0,
            node=f"node-{role}-{ordinal}:8000",
            job=crowd.job,
            digest=shared.digest,
            settings=shared.values,
        )
        self.member = Member(crowd.rules, me, lambda: self.worker, time.monotonic(), is_rank0=first)
        self.worker = IDLE
        self.sent_at = 0.0
        self._request: Request | None = None  # to be posted
        self._changed: asyncio.Future[None] | None = None
        self._exit_code: int | None = None

    @property
    def directive(self) -> Directive | None:
        return self.member.directive

    async def run(self) -> None:
        """Beats until the job is over for this member, or it is cancelled."""
        loop = asyncio.get_running_loop()
        self._perform(self.member.start(time.monotonic()))
        while self._request and self._exit_code is None:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self.crowd.port)
            try:
                while self._request and self._exit_code is None:
                    if not await self._beat(connection, self._request):
                        break
            finally:
                connection.close()

    async def _beat(self, connection: Connection, request: Request) -> bool:
        """One request, up to its answer or to something newer; False where the connection is of no use any more."""
        member, crowd, before = self.member, self.crowd, self.member.directive
        self.sent_at, self._request = time.monotonic(), None
        answer, self._changed = connection.post(encode(request.beat)), asyncio.get_running_loop().create_future()
        await asyncio.wait({answer, self._changed}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return False  # the connection is closed, and the news goes out
        now = time.monotonic()
        crowd.beats += 1
        crowd.whole += request.beat.heartbeat is not None
        crowd.slowest = max(crowd.slowest, now - self.sent_at)
        try:
            batch = member.answered(request, decode(Answer, answer.result()), now)
        except ConnectionError as error:
            batch = member.failed(request, str(error), now)
        self._perform(batch)
        if member.retries:
            crowd.failures += 1
            await asyncio.sleep(RETRY_SECONDS)
            self._perform(member.tick(time.monotonic(), None))
            return False
        if member.directive is not before:
            crowd.ordered(self, now)
        return True

    def _perform(self, batch: Batch) -> None:
        self._request = batch.request or self._request
        self._exit_code = batch.exit_code
        if batch.action:
            self._act(batch.action)
            self._perform(self.member.done(batch.action, time.monotonic()))

    def _act(self, action: Action) -> None:
        directive = action.directive
        if action.kind == "start":
            self.worker = WorkerStatus(directive.generation, "running", step=1 if self.first else 0)
        elif action.kind == "end" and self.worker.state == "running":
            self.worker = WorkerStatus(self.worker.generation, "ended", "stopped")
        elif directive.drain:
            self.worker = WorkerStatus(self.worker.generation, "ended", "drained", step=2)

    def worker_ends(self, outcome: str, state: WorkerState = "ended") -> None:
        """Its worker ends."""
        self.worker = WorkerStatus(self.worker.generation, state, outcome)  # type: ignore[arg-type]
        self._tell(self.member.changed(time.monotonic()))

    def leave(self) -> None:
        """Its supervisor is sent SIGTERM."""
        self._tell(self.member.leave("SIGTERM", time.monotonic()))

    def _tell(self, batch: Batch) -> None:
        """Its heartbeat goes out at once."""
        self._perform(batch)
        if self._changed and not self._changed.done():
            self._changed.set_result(None)


class Crowd:
    """So many members of a coordinator at `port`. `run` lets them live."""

    def __init__(self, members: int, port: int, rules: Rules) -> None:
        job = describe(members)
        self.port, self.rules, self.job = port, rules, job.identity
        self.agreement = job.agreement(Settings())
        self.beats = self.whole = self.failures = 0
        self.slowest = 0.0
        self.speakers = [
            Speaker(self, role.name, ordinal, role is job.roles[0])
            for role in job.roles
            for ordinal in range(role.count)
        ]
        self._until: tuple[Callable[[Speaker], bool], set[Speaker], asyncio.Future[float]] | None = None
        self._tasks: dict[Speaker, asyncio.Task[None]] = {}

    async def join(self) -> None:
        """All begin to beat; the first ones first."""
        for start in range(0, len(self.speakers), AT_ONCE):
            for each in self.speakers[start : start + AT_ONCE]:
                self._tasks[each] = asyncio.create_task(each.run())
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Nobody beats any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def silence(self, speaker: Speaker) -> float:
        """`speaker` falls silent. Returns when its last beat was sent (monotonic seconds)."""
        self._tasks[speaker].cancel()
        return speaker.sent_at

    def ended(self, speaker: Speaker) -> asyncio.Future[float]:
        """When `speaker` has ended (monotonic seconds)."""
        at: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._tasks[speaker].add_done_callback(lambda _: at.set_result(time.monotonic()))
        return at

    def ordered(self, speaker: Speaker, now: float) -> None:
        """`speaker` has a new directive."""
        if self._until:
            has, left, last = self._until
            if has(speaker):
                left.discard(speaker)
                if not left and not last.done():
                    last.set_result(now)

    def when_all(self, has: Callable[[Speaker], bool], but: Sequence[Speaker] = ()) -> asyncio.Future[float]:
        """When the last of the members, all `but` some, `has` what it waits for (monotonic seconds)."""
        left = {each for each in self.speakers if each not in but and not has(each)}
        last: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._until = has, left, last
        if not left:
            last.set_result(time.monotonic())
        return last
