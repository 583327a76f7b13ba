"""Connections at METRICS_PORT, which anybody may open: how many there are at a time, and how fast they are served.

They share the supervisor's event loop with the heartbeats, and the machine with the training. So connections and
requests are taken at a fixed rate, however many come; those beyond it wait. aiohttp closes a connection on which no
request arrives within its keep-alive time.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from rolecall import telemetry

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_CONNECTIONS = 128
REQUEST_INTERVAL_SECONDS = 0.005  # seconds from one request to the next
ACCEPT_INTERVAL_SECONDS = 0.002  # seconds from one connection to the next
PROBLEM_SECONDS = 1.0  # seconds from a connection that cannot be taken to the next
LOG_REPEAT_SECONDS = 60.0  # seconds between two log lines about that


class Port:
    """The port of `app`. Beyond `most` connections, a new one replaces the one that has asked nothing for longest."""

    def __init__(self, app: web.Application, most: int = 0) -> None:
        self._most = most or min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._asked_at = dict[RequestHandler, float]()  # of each connection: its last request, or its beginning
        self._serving = set[RequestHandler]()
        self._next = 0.0  # when the next request is served
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_at = float("-inf")
        app.middlewares.append(self._pace)
        app.on_shutdown.append(self._close)

    async def listen(self, server: web.Server, host: str, port: int) -> None:
        """Serves the application by `server`, on every address if `host` is empty. Raises OSError."""
        bound = await asyncio.get_running_loop().create_server(server, host or None, port, start_serving=False)
        for sock in bound.sockets:
            listener = socket.socket(fileno=os.dup(sock.fileno()))
            listener.listen(1024)
            self._tasks.append(asyncio.create_task(self._accept_forever(listener, server)))
        bound.close()  # the copies listen

    async def _close(self, _: web.Application) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept_forever(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                while not self._has_room():  # noqa: ASYNC110 connections end at any moment
                    await asyncio.sleep(ACCEPT_INTERVAL_SECONDS)
                try:
                    connection, _ = await loop.sock_accept(listener)
                    _, protocol = await loop.connect_accepted_socket(server, connection)
                except OSError as error:  # no file is left, or it is gone already
                    if time.monotonic() - self._warned_at > LOG_REPEAT_SECONDS:
                        self._warned_at = time.monotonic()
                        telemetry.log().warning("METRICS_PORT: a connection cannot be taken", problem=error.strerror)
                    await asyncio.sleep(PROBLEM_SECONDS)
                    continue
                self._asked_at[protocol] = time.monotonic()
                await asyncio.sleep(ACCEPT_INTERVAL_SECONDS)

    def _has_room(self) -> bool:
        """Whether there is room for a connection, perhaps because one was closed that was not being served."""
        for ended in [each for each in self._asked_at if each.transport is None]:
            del self._asked_at[ended]
        if len(self._asked_at) < self._most:
            return True
        idle = self._asked_at.keys() - self._serving
        if idle:
            oldest = min(idle, key=self._asked_at.__getitem__)
            del self._asked_at[oldest]
            if oldest.transport:
                oldest.transport.abort()
        return bool(idle)

    @web.middleware
    async def _pace(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol, now = request.protocol, time.monotonic()
        if protocol in self._asked_at:  # and was not given up just now
            self._asked_at[protocol] = now
        self._serving.add(protocol)
        try:
            at = max(now, self._next)
            self._next = at + REQUEST_INTERVAL_SECONDS
            await asyncio.sleep(at - now)
            return await handler(request)
        finally:
            self._serving.discard(protocol)
