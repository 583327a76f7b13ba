"""POST /v1/ask at rank 0's METRICS_PORT: sends a query to all ranks, for clients that know JOB_TOKEN."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.gang.protocol import Key, name_of
from rolecall.messages.codec import decode_line, encode, encode_line
from rolecall.messages.queries import Ask, Question, ReadTrace, read
from rolecall.rank.queries import Queries
from rolecall.tunnel.signatures import ASK_PATH, DeniedError, SignatureChecker

MAX_BODY_BYTES = 64 * 1024
ARRIVAL_SECONDS = 10.0  # for a request to arrive
POLL_SECONDS = 0.25  # between two checks whether the job is over
LOG_REPEAT_SECONDS = 10.0  # between two log lines of refusals


class SignedQueries:
    """The endpoint of one rank. Only rank 0's answers, from `start` on."""

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
            async with asyncio.timeout(ARRIVAL_SECONDS):
                body = await request.clone(client_max_size=MAX_BODY_BYTES).read()
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
