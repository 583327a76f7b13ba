"""Queries of rank 0, or of clients, to the supervisors of all ranks, and their replies.

The answer to a member's heartbeat carries the queries, and the member posts each reply to the coordinator. So every
member can be queried, even if its worker hangs.

The way of a query: `Queries.ask` → `Query` in the `Answer` to a heartbeat → `Replies.take` → `Supervisor._reply` →
`CoordinatorClient.reply` → HTTP → `Queries.receive`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.gang.protocol import Key, Query, name_of
from rolecall.messages.codec import MessageError, decode_line, encode, encode_line
from rolecall.messages.queries import Ask, Question, ReadTrace, Reply, read
from rolecall.rank import tasks
from rolecall.tunnel.rank0 import REPLY_ARRIVAL_SECONDS
from rolecall.tunnel.signatures import ASK_PATH, DeniedError, SignatureChecker

MAX_REPLY_BYTES = 32 * 2**20
RESEND_SECONDS = 1.0  # until a query is sent again: the answer that carried it may be lost
MAX_REMEMBERED_QUERIES = 1000  # a member replies to each once
WALL_NS = time.time_ns() - time.monotonic_ns()  # Unix time minus monotonic time, the same for all of rank 0's replies
MAX_REQUEST_BYTES = 64 * 1024
REQUEST_SECONDS = 10.0  # for a client's request to arrive
POLL_SECONDS = 0.25  # between two checks whether the job is over
LOG_REPEAT_SECONDS = 10.0  # between two log lines of refusals
Post = Callable[[str, Any], Awaitable[None]]

# ---- rank 0's end


@dataclass(eq=False)
class Pending:
    """A query to one member, and its reply."""

    query: Query
    replied: asyncio.Future[Any]
    sent_at: float = float("-inf")
    first_sent_ns: int = 0


@dataclass
class Queries:
    """Sends queries. `members` are those that can be asked; `wake` answers a member's waiting heartbeat."""

    members: Callable[[], Collection[Key]]
    wake: Callable[[Key], None]
    _pending: dict[Key, dict[str, Pending]] = field(default_factory=dict)

    async def ask(
        self, question: Question, *, to: Collection[Key] | None = None, timeout: float = 5.0
    ) -> dict[Key, Any]:
        """Asks the members `to`, or all, and returns their replies, as JSON's types. A member that does not reply
        within `timeout` seconds, or cannot, has {"error": ...}.
        """
        arguments = msgspec.to_builtins(question)
        what = arguments.pop("what")
        here = set(self.members())
        keys = sorted(here if to is None else set(to))
        replies: dict[Key, Any] = {key: {"error": "is not in the gang"} for key in keys if key not in here}
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + timeout
        asked = {}
        for key in keys:
            if key in here:
                query = Query(secrets.token_hex(8), what, arguments, timeout)
                asked[key] = Pending(query, loop.create_future())
                self._pending.setdefault(key, {})[query.number] = asked[key]
        try:
            missing = {each.replied for each in asked.values()}
            while missing and (left := deadline - time.monotonic()) > 0:
                for key, each in asked.items():
                    if not each.replied.done():
                        self.wake(key)
                _, missing = await asyncio.wait(missing, timeout=min(left, RESEND_SECONDS))
        finally:
            for key, each in asked.items():
                self._pending[key].pop(each.query.number)
                if not self._pending[key]:
                    del self._pending[key]
        late = {"error": f"did not answer within {timeout:g} s"}
        replies |= {key: each.replied.result() if each.replied.done() else late for key, each in asked.items()}
        return replies

    def due(self, key: Key) -> tuple[Query, ...]:
        """The queries to send to the member `key` now."""
        now = time.monotonic()
        due = [each for each in self._pending.get(key, {}).values() if now - each.sent_at > RESEND_SECONDS]
        for each in due:
            each.sent_at, each.first_sent_ns = now, each.first_sent_ns or time.monotonic_ns()
        return tuple(each.query for each in due)

    async def receive(self, request: web.Request) -> web.Response:
        """Receives a reply. A late one is dropped. One that has its rank's time gets rank 0's before and after it."""
        received = {"received_ns": time.monotonic_ns(), "wall_ns": WALL_NS}
        try:
            async with asyncio.timeout(REPLY_ARRIVAL_SECONDS):
                body = await request.clone(client_max_size=MAX_REPLY_BYTES).read()
            reply: Reply = await asyncio.to_thread(decode_line, Reply, body, MAX_REPLY_BYTES)
        except (MessageError, TimeoutError):
            return web.json_response({"reason": "body", "text": "no reply to a query"}, status=400)
        for pending in self._pending.values():
            if (each := pending.get(reply.number)) and not each.replied.done():
                if isinstance(reply.result, dict) and "clock_ns" in reply.result:
                    reply.result.update(sent_ns=each.first_sent_ns, **received)
                each.replied.set_result(reply.result)
        return web.json_response({})


# ---- a member's end


class Replies:
    """Replies to queries by `handler`, which returns JSON's types or a message of them."""

    def __init__(self, handler: Callable[[Question], Awaitable[Any]]) -> None:
        self._handler = handler
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._tasks = set[asyncio.Task[None]]()

    def take(self, queries: Collection[Query], post: Post) -> None:
        """Replies to those of `queries` that are new, by `post`."""
        for query in queries:
            if query.number in self._seen:
                continue
            self._seen[query.number] = None
            while len(self._seen) > MAX_REMEMBERED_QUERIES:
                self._seen.popitem(last=False)
            task = asyncio.create_task(self._reply(query, post))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, query: Query, post: Post) -> None:
        result: Any
        try:
            try:
                question = read(query.what, query.arguments)
            except MessageError:
                problem = f"cannot read the query {query.what!r}; run the same version in every rank"
                raise LookupError(problem) from None
            async with asyncio.timeout(query.timeout):
                result = await self._handler(question)
            encode_line(result)
        except TimeoutError:
            result = {"error": f"has no reply after {query.timeout:g} s"}
        except Exception as error:  # a query must not end a rank
            line = (str(error).strip().splitlines() or [""])[0]
            result = {"error": line or type(error).__name__}
        try:
            await post(query.number, result)
        except Exception as error:  # rank 0 is gone, or asks again
            telemetry.log().info("a reply did not reach rank 0", query=query.what, problem=str(error))

    async def close(self) -> None:
        """Ends what is under way."""
        await tasks.cancel(self._tasks)


# ---- clients


class SignedQueries:
    """POST /v1/ask at a rank's METRICS_PORT: sends a query to all ranks, for clients that know JOB_TOKEN. Only rank 0
    answers, from `start` on."""

    def __init__(self, settings: Settings, is_rank0: bool) -> None:
        self._rank0_address = settings.master_addr
        self._is_rank0, self._signatures = is_rank0, SignatureChecker(settings.token)
        self._queries: Queries | None = None
        self._over: Callable[[], bool] = lambda: False
        self._warned_at = float("-inf")

    def start(self, queries: Queries, over: Callable[[], bool]) -> None:
        """Answers by `queries` until the job is `over`."""
        self._queries, self._over = queries, over

    def routes(self) -> list[web.RouteDef]:
        """Its routes."""
        return [web.post(ASK_PATH, self._ask)]

    async def _ask(self, request: web.Request) -> web.Response:
        if not self._is_rank0:
            return _problem(
                404, f"this rank is not rank 0; ask the METRICS_PORT of rank 0, which is at {self._rank0_address}"
            )
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                body = await request.clone(client_max_size=MAX_REQUEST_BYTES).read()
            self._signatures.check(request.headers.get("Authorization", ""), request.method, request.path, body)
            question, to, timeout = _read(body)
        except DeniedError as error:
            self._warn(f"{request.remote}: {error}")
            return _problem(403, str(error))
        except (ValueError, TimeoutError):
            return _problem(400, "no query: {what, arguments, to, timeout}")
        if self._queries is None:
            return _problem(503, "rank 0 is starting; try again")
        asking = asyncio.create_task(self._queries.ask(question, to=to, timeout=timeout))
        try:
            while not asking.done():
                if self._over() and not isinstance(question, ReadTrace):  # a rank that ends replies to nothing else
                    return _problem(409, "the job is over")
                await asyncio.wait({asking}, timeout=POLL_SECONDS)
        finally:
            asking.cancel()
        replies = asking.result()
        named = {name_of(key): reply for key, reply in replies.items()}
        return web.Response(body=await asyncio.to_thread(encode_line, named), content_type="application/json")

    def _warn(self, problem: str) -> None:
        """Logs a refusal at most once per LOG_REPEAT_SECONDS: anyone can cause them."""
        now = time.monotonic()
        if now - self._warned_at > LOG_REPEAT_SECONDS:
            self._warned_at = now
            telemetry.log().warning("refused", reason="permission", problem=problem)


def _read(body: bytes) -> tuple[Question, list[Key] | None, float]:
    """The question, its members (None for all) and its timeout. Raises ValueError."""
    asked: Ask = decode_line(Ask, body)
    question = read(asked.what, asked.arguments or {})
    encode(question)  # it must fit an answer
    return question, None if asked.to is None else [*map(_key, asked.to)], asked.timeout


def _key(name: str) -> Key:
    role, ordinal = name.rsplit("_", 1)
    return role, int(ordinal)


def _problem(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
