"""POST /v1/ask at rank 0's METRICS_PORT: has all ranks reply to a query, for whoever knows JOB_TOKEN."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.gang.protocol import Answer, Key, Query, name_of
from rolecall.rank import messages
from rolecall.rank.queries import Queries
from rolecall.tunnel.permission import ASK_PATH, DeniedError, Permission

MOST_BODY = 64 * 1024  # bytes
LONGEST = 600.0  # seconds that a query may take
ARRIVAL = 10.0  # seconds for a request to arrive
HANDED_OVER = "spans"  # by ranks that end
LOOK = 0.25  # seconds between two looks whether the job is over
REPEAT = 10.0  # seconds between two log lines of refusals


class Outside:
    """Serves one rank. `queries` and `over` are set at rank 0, once it can ask."""

    def __init__(self, settings: Settings, first: bool) -> None:
        self._where = settings.master_addr
        self._first, self._permission = first, Permission(settings.token)
        self.queries: Queries | None = None
        self.over: Callable[[], bool] = lambda: False  # whether the job is
        self._warned_at = float("-inf")

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        return [web.post(ASK_PATH, self._ask)]

    async def _ask(self, request: web.Request) -> web.Response:
        if not self._first:
            return _problem(404, f"this rank is not rank 0; ask the METRICS_PORT of rank 0, which is at {self._where}")
        try:
            async with asyncio.timeout(ARRIVAL):
                body = await request.clone(client_max_size=MOST_BODY).read()
            self._permission.check(request.headers.get("Authorization", ""), request.method, request.path, body)
            what, arguments, to, timeout = _read(body)
        except DeniedError as error:
            self._warn(f"{request.remote}: {error}")
            return _problem(403, str(error))
        except (ValueError, TypeError, KeyError, AttributeError, TimeoutError):
            return _problem(400, "no query: {what, arguments, to, timeout}")
        if self.queries is None:
            return _problem(503, "rank 0 is starting; try again")
        asking = asyncio.create_task(self.queries.ask(what, arguments, to, timeout))
        try:
            while not asking.done():
                if self.over() and what != HANDED_OVER:  # its ranks end, and answer nothing else any more
                    return _problem(409, "the job is over")
                await asyncio.wait({asking}, timeout=LOOK)
        finally:
            asking.cancel()
        replies = asking.result()
        named = {name_of(key): reply for key, reply in replies.items()}
        return web.Response(text=await asyncio.to_thread(json.dumps, named), content_type="application/json")

    def _warn(self, problem: str) -> None:
        """Logs a refusal. Those that follow soon are not logged: anybody can cause them."""
        now = time.monotonic()
        if now - self._warned_at > REPEAT:
            self._warned_at = now
            telemetry.log().warning("refused", reason="permission", problem=problem)


def _read(body: bytes) -> tuple[str, dict[str, Any], list[Key] | None, float]:
    """A query's parts. Raises ValueError, TypeError or KeyError for anything else."""
    query = json.loads(body)
    timeout, arguments = float(query.get("timeout", 5.0)), dict(query.get("arguments") or {})
    if not 0 < timeout <= LONGEST:
        raise ValueError
    messages.write_answer(Answer(queries=(Query("", str(query["what"]), arguments, timeout),)))  # as it travels
    return str(query["what"]), arguments, None if query.get("to") is None else [*map(_key, query["to"])], timeout


def _key(name: str) -> Key:
    role, ordinal = name.rsplit(" ", 1)
    return role, int(ordinal)


def _problem(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
