"""Connections at METRICS_PORT, which anybody may open: how many there are at a time.

They share the supervisor's event loop with the heartbeats: a cap keeps them few, however many come. aiohttp closes
those on which no request arrives within its keep-alive time.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_CONNECTIONS = 128
BACKLOG = 16  # that one turn of the event loop takes: a request is read before its connection is the oldest
CONNECT_SECONDS = 1.0  # for which a new connection may have no transport


class Port:
    """The port of `app`. Beyond `most` connections, a new one replaces the one that has asked nothing for longest."""

    def __init__(self, app: web.Application, most: int = 0) -> None:
        self._most = most or min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._asked_at = dict[RequestHandler, float]()  # of each connection: its last request, or its beginning
        app.middlewares.append(self._note)
        app.on_shutdown.append(self._close)

    async def listen(self, server: web.Server, host: str, port: int) -> None:
        """Serves the application by `server`, on every address if `host` is empty. Raises OSError."""

        def connect() -> RequestHandler:
            self._make_room()
            protocol = server()
            self._asked_at[protocol] = time.monotonic()
            return protocol

        self._bound = await asyncio.get_running_loop().create_server(connect, host or None, port, backlog=BACKLOG)

    async def _close(self, _: web.Application) -> None:
        self._bound.close()

    def _make_room(self) -> None:
        recent = time.monotonic() - CONNECT_SECONDS
        for ended in [each for each, at in self._asked_at.items() if each.transport is None and at < recent]:
            del self._asked_at[ended]
        if len(self._asked_at) >= self._most:
            oldest = min(self._asked_at, key=self._asked_at.__getitem__)
            del self._asked_at[oldest]
            if oldest.transport:
                oldest.transport.abort()

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.protocol in self._asked_at:  # and was not given up just now
            self._asked_at[request.protocol] = time.monotonic()
        return await handler(request)
