"""Connections at METRICS_PORT, which anybody may open: how many there are at a time, and how fast they are served.

They share the supervisor's event loop with the heartbeats, and the machine with the training. So connections and
requests are taken at a fixed rate, however many come; those beyond it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
REQUEST_ARRIVAL_SECONDS = 10.0  # seconds from a connection to its first request's last header
LOG_REPEAT_SECONDS = 60.0  # seconds between two log lines about the same problem
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Port:
    """The port of `app`. Beyond `most` connections, a new one replaces the one that has asked nothing for longest."""

    def __init__(self, app: web.Application, most: int = 0) -> None:
        self._most = most or min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._asked_at = dict[RequestHandler, float]()  # of each connection: its last request, or its beginning
        self._new = set[RequestHandler]()  # those without a request
        self._serving = set[RequestHandler]()
        self._next = 0.0  # when the next request is served
        self._idle = asyncio.Event()  # a connection has been served, or has ended
        self._tasks: list[asyncio.Task[None]] = []
        self._problems, self._warned_at = 0, float("-inf")
        app.middlewares.append(self._pace)
        app.on_shutdown.append(self._close)

    async def listen(self, runner: web.AppRunner, host: str, port: int) -> None:
        """Serves `runner`, whose application this one's is, on every address if `host` is empty. Raises OSError."""
        assert runner.server is not None
        bound = await asyncio.get_running_loop().create_server(runner.server, host or None, port, start_serving=False)
        for sock in bound.sockets:
            listener = socket.socket(fileno=os.dup(sock.fileno()))
            listener.listen(1024)
            self._tasks.append(asyncio.create_task(self._accept_forever(listener, runner.server)))
        await _Site(runner, bound).start()
        self._tasks.append(asyncio.create_task(self._close_late_forever()))

    async def _close(self, _: web.Application) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept_forever(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                await self._make_room()
                try:
                    connection, _ = await loop.sock_accept(listener)
                    _, protocol = await loop.connect_accepted_socket(server, connection)
                except OSError as error:
                    self._warn(error)
                    await asyncio.sleep(1.0 if error.errno in OUT_OF_DESCRIPTORS else ACCEPT_INTERVAL_SECONDS)
                    continue
                self._asked_at[protocol] = time.monotonic()
                self._new.add(protocol)
                await asyncio.sleep(ACCEPT_INTERVAL_SECONDS)

    async def _make_room(self) -> None:
        """Waits until there is room for a connection: closes one that is not being served."""
        while True:
            self._forget_ended()
            if len(self._asked_at) < self._most:
                return
            idle = self._asked_at.keys() - self._serving
            if idle:
                self._abort(min(idle, key=self._asked_at.__getitem__))
                return
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), 1.0)  # one may have ended without a word

    async def _close_late_forever(self) -> None:
        """Closes connections whose first request does not arrive."""
        while True:
            await asyncio.sleep(1.0)
            self._forget_ended()
            now = time.monotonic()
            for protocol in [each for each in self._new if now - self._asked_at[each] > REQUEST_ARRIVAL_SECONDS]:
                self._abort(protocol)

    def _forget_ended(self) -> None:
        for protocol in [each for each in self._asked_at if each.transport is None]:
            self._forget(protocol)

    def _abort(self, protocol: RequestHandler) -> None:
        if protocol.transport:
            protocol.transport.abort()
        self._forget(protocol)

    def _forget(self, protocol: RequestHandler) -> None:
        self._asked_at.pop(protocol, None)
        self._new.discard(protocol)

    @web.middleware
    async def _pace(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol, now = request.protocol, time.monotonic()
        if protocol in self._asked_at:  # and was not given up just now
            self._asked_at[protocol] = now
        self._new.discard(protocol)
        self._serving.add(protocol)
        try:
            at = max(now, self._next)
            self._next = at + REQUEST_INTERVAL_SECONDS
            await asyncio.sleep(at - now)
            return await handler(request)
        finally:
            self._serving.discard(protocol)
            self._idle.set()

    def _warn(self, error: OSError) -> None:
        """Logs a problem with a connection: one line and a count, since anybody can cause many."""
        self._problems += 1
        now = time.monotonic()
        if now - self._warned_at > LOG_REPEAT_SECONDS:
            telemetry.log().warning(
                "METRICS_PORT: a connection cannot be taken", problem=error.strerror or str(error), times=self._problems
            )
            self._warned_at, self._problems = now, 0


class _Site(web.BaseSite):
    """What the runner knows of the listeners: it says their addresses, and closes them."""

    def __init__(self, runner: web.AppRunner, bound: asyncio.Server) -> None:
        super().__init__(runner)
        self._bound = bound

    @property
    def name(self) -> str:
        return "METRICS_PORT"

    async def start(self) -> None:
        await super().start()
        self._server = self._bound
