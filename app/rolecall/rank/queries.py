"""Queries of rank 0 to the supervisors of all ranks, and their replies: statistics, stacks, spans, leaving.

A query is sent with the answer to a member's heartbeat, and the reply is posted to the coordinator. So every member can
be queried, even if its worker hangs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rolecall import telemetry
from rolecall.gang.protocol import Key, Query
from rolecall.rank import tasks

PATH = "/v1/reply"
MAX_REPLY_BYTES = 32 * 2**20  # bytes
RESEND_SECONDS = 1.0  # seconds until a query is sent again: what carried it may be lost
MAX_REMEMBERED_QUERIES = 1000  # queries that a member knows again
REPLY_ARRIVAL_SECONDS = 60.0  # seconds that a reply may take to arrive, once it is there
Handler = Callable[[dict[str, Any]], Awaitable[Any]]
Post = Callable[[str, Any], Awaitable[None]]


@dataclass(eq=False)
class Pending:
    """A query to one member, and its reply."""

    query: Query
    replied: asyncio.Future[Any]
    sent_at: float = float("-inf")


@dataclass
class Queries:
    """Rank 0's end. `members` are those that can be asked; `wake` answers a member's waiting heartbeat."""

    members: Callable[[], Collection[Key]]
    wake: Callable[[Key], None]
    _pending: dict[Key, dict[str, Pending]] = field(default_factory=dict)

    async def ask(
        self,
        what: str,
        arguments: dict[str, Any] | None = None,
        to: Collection[Key] | None = None,
        timeout: float = 5.0,
    ) -> dict[Key, Any]:
        """Asks the members `to`, or all, and returns what they replied, JSON's types. One that does not within
        `timeout` seconds, or could not, has {"error": ...}.
        """
        here = set(self.members())
        keys = sorted(here if to is None else set(to))
        replies: dict[Key, Any] = {key: {"error": "is not in the gang"} for key in keys if key not in here}
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + timeout
        asked = {}
        for key in keys:
            if key in here:
                query = Query(secrets.token_hex(8), what, arguments or {}, timeout)
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
            each.sent_at = now
        return tuple(each.query for each in due)

    async def receive(self, request: web.Request) -> web.Response:
        """Receives a reply. A late one is dropped."""
        try:
            async with asyncio.timeout(REPLY_ARRIVAL_SECONDS):
                body = await request.clone(client_max_size=MAX_REPLY_BYTES).read()
            reply = await asyncio.to_thread(json.loads, body)
            number, result = str(reply["number"]), reply["result"]
        except (ValueError, TypeError, KeyError, TimeoutError):
            return web.json_response({"reason": "body", "text": "no reply to a query"}, status=400)
        for pending in self._pending.values():
            if (each := pending.get(number)) and not each.replied.done():
                each.replied.set_result(result)
        return web.json_response({})


class Replies:
    """A member's end: `on` says who replies to what."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._tasks = set[asyncio.Task[None]]()

    def on(self, what: str, handler: Handler) -> None:
        """Has `handler` reply to queries of `what`: it is given their arguments, and returns JSON's types."""
        self._handlers[what] = handler

    def take(self, queries: Collection[Query], post: Post) -> None:
        """Begins to reply to those of `queries` that are new, by `post`."""
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
            handler = self._handlers.get(query.what)
            if handler is None:
                raise LookupError(f"does not know what {query.what!r} is; run the same version in every rank")
            async with asyncio.timeout(query.timeout):
                result = await handler(query.arguments)
            json.dumps(result)
        except TimeoutError:
            result = {"error": f"could not tell within {query.timeout:g} s"}
        except Exception as error:  # a question must not end a rank
            first = (str(error).strip().splitlines() or [""])[0]
            result = {"error": first or type(error).__name__}
        try:
            await post(query.number, result)
        except Exception as error:  # rank 0 is gone, or asks again
            telemetry.log().info("a reply did not reach rank 0", query=query.what, problem=str(error))

    async def close(self) -> None:
        """Ends what is under way."""
        await tasks.cancel(self._tasks)
