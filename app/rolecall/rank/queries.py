"""Queries of rank 0 to the supervisors of all ranks, and their replies: statistics, stacks, spans, leaving.

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
from rolecall.gang.protocol import Key, Query
from rolecall.messages.codec import MessageError, decode_line, encode_line
from rolecall.messages.queries import Question, Reply, read
from rolecall.rank import tasks
from rolecall.tunnel.rank0 import REPLY_ARRIVAL_SECONDS

MAX_REPLY_BYTES = 32 * 2**20
RESEND_SECONDS = 1.0  # until a query is sent again: the answer that carried it may be lost
MAX_REMEMBERED_QUERIES = 1000  # a member replies to each once
WALL_NS = time.time_ns() - time.monotonic_ns()  # Unix time minus monotonic time, the same for all of rank 0's replies
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
