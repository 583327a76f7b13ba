"""What a rank serves on METRICS_PORT: /metrics, /healthz (liveness) and /readyz."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.rank.port import Port

MAX_DESCRIPTORS = 65536
KEEPALIVE_SECONDS = 30.0  # without a request; scrapes are more frequent
SCRAPE_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"  # a header that only Prometheus sends
MAX_REST_SECONDS = 1.0  # seconds between two encodings of metrics
MAX_CPU_SHARE = 0.1  # of one core for them, at most
MAX_SCRAPE_INTERVAL = 60.0  # seconds between two scrapes; a rank does not wait for rarer ones


class Scrapes:
    """When Prometheus scraped this rank. A rank whose job is over waits for one more scrape, which takes its last
    values and how the job ended. It does not wait if scrapes are irregular. `clock` is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=4)
        self._arrived = asyncio.Event()

    def record(self) -> None:
        """Prometheus scrapes this rank now."""
        self._times.append(self._clock())
        self._arrived.set()

    def patience(self) -> float:
        """Seconds within which the next scrape is due; 0 if none is expected."""
        times = [*self._times]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        if not gaps or max(gaps) > MAX_SCRAPE_INTERVAL:
            return 0.0
        return max(0.0, times[-1] + 1.5 * max(gaps) + 1.0 - self._clock())

    async def once_more(self) -> None:
        """Waits for the next scrape, for `patience()` seconds at most."""
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), self.patience())


class Bodies:
    """The metrics as text, encoded in a thread. Requests that wait at the same time get the same."""

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
        self._registry, self._refresh = registry, refresh
        self._bodies = dict[str, tuple[float, bytes]]()  # by content type: when its encoding began
        self._rests_until = 0.0
        self._lock = asyncio.Lock()

    async def get(self, accept: str) -> tuple[bytes, str]:
        """The body for a request's header Accept, and its content type."""
        encode, content_type = choose_encoder(accept)
        arrived = time.monotonic()
        async with self._lock:
            begun, body = self._bodies.get(content_type, (float("-inf"), b""))
            if begun < arrived:
                await asyncio.sleep(self._rests_until - time.monotonic())
                self._refresh()
                begun = time.monotonic()
                body = await asyncio.to_thread(encode, self._registry)
                now = time.monotonic()
                self._bodies[content_type] = begun, body
                self._rests_until = now + min(MAX_REST_SECONDS, (now - begun) / MAX_CPU_SHARE)
        return body, content_type


async def serve(
    settings: Settings,
    registry: CollectorRegistry,
    refresh: Callable[[], None],
    unhealthy: Callable[[], str],
    unready: Callable[[], str],
    scrapes: Scrapes | None = None,
    routes: Iterable[web.RouteDef] = (),
) -> web.AppRunner:
    """Starts serving. `refresh` is called before a scrape; `unhealthy` and `unready` return what is wrong, or nothing.
    Scrapes by Prometheus are recorded in `scrapes`; `routes` are served too.

    Raises UsageError if the port cannot be used.
    """

    bodies = Bodies(registry, refresh)

    async def metrics(request: web.Request) -> web.Response:
        body, content_type = await bodies.get(request.headers.get("Accept", ""))
        if scrapes and SCRAPE_HEADER in request.headers:
            scrapes.record()
        return web.Response(body=body, headers={"Content-Type": content_type})

    def status(problem: Callable[[], str]) -> Callable[[web.Request], web.Response]:
        async def answer(request: web.Request) -> web.Response:
            wrong = problem()
            return web.Response(text=(wrong or "ok") + "\n", status=503 if wrong else 200)

        return answer  # type: ignore[return-value]

    app = web.Application(client_max_size=1024)
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", status(unhealthy)), web.get("/readyz", status(unready))]  # type: ignore[arg-type]
    )
    app.add_routes(routes)
    port = Port(app)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=1.0,  # long requests are cut off when the rank ends
    )
    await runner.setup()
    host = settings.metrics_bind_addr or settings.bind_addr
    with _unusable(host, settings.metrics_port, "METRICS_PORT"):
        assert runner.server is not None
        await port.listen(runner.server, host, settings.metrics_port)
    return runner


def allow_descriptors() -> None:
    """Raises the limit of open files: a thousand idle connections must not keep ranks from connecting."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def listen(runner: web.AppRunner, host: str, port: int, variable: str) -> None:
    """Serves `runner` on `host`, on every address if that is empty. Raises UsageError if the port, which
    `variable` names, cannot be used."""
    with _unusable(host, port, variable):
        await web.TCPSite(runner, host or None, port, backlog=1024).start()


@contextlib.contextmanager
def _unusable(host: str, port: int, variable: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # asyncio's own text is long; a name's resolution has an errno of another kind
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        where = f"at {host or 'any address'} ({problem})"
        raise UsageError(f"{variable}={port}: cannot listen on it {where}; {config.port_advice(variable)}") from error
