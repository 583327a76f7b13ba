"""What a rank serves on METRICS_PORT: /metrics, /healthz (liveness) and /readyz."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from app.config import Settings, UsageError

DESCRIPTORS = 65536


async def serve(
    settings: Settings,
    registry: CollectorRegistry,
    refresh: Callable[[], None],
    unhealthy: Callable[[], str],
    unready: Callable[[], str],
) -> web.AppRunner:
    """Start serving. `refresh` is called before a scrape; the other two say what is wrong, or nothing.

    Raises UsageError where the port cannot be had.
    """

    async def metrics(request: web.Request) -> web.Response:
        refresh()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    def says(problem: Callable[[], str]) -> Callable[[web.Request], web.Response]:
        async def answer(request: web.Request) -> web.Response:
            wrong = problem()
            return web.Response(text=(wrong or "ok") + "\n", status=503 if wrong else 200)

        return answer  # type: ignore[return-value]

    app = web.Application(client_max_size=1024)
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", says(unhealthy)), web.get("/readyz", says(unready))]  # type: ignore[arg-type]
    )
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=30)  # scrapers ask more often
    await runner.setup()
    _allow_descriptors()
    await listen(runner, settings.metrics_bind_addr or settings.bind_addr, settings.metrics_port, "METRICS_PORT")
    return runner


def _allow_descriptors() -> None:
    """A thousand idle strangers on this process's ports must not keep ranks from connecting."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def listen(runner: web.AppRunner, host: str, port: int, variable: str) -> None:
    """Let `runner` serve on `host`. Raises UsageError where the port, which `variable` names, cannot be had."""
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        # asyncio's own text is long; a name's resolution has an errno of another kind
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UsageError(f"{variable}={port}: cannot listen on it at {host} ({problem}); choose another") from error
