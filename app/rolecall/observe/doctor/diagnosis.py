"""What rank 0 tells a `rolecall doctor`, over the channel of heartbeats: versions, clock, what ranks must agree on."""

from __future__ import annotations

import asyncio
import functools
import hmac
import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from aiohttp import web

from rolecall.config import Settings, __version__
from rolecall.declare.describe import Description
from rolecall.tunnel import keys

PATH = "/v1/doctor"
LARGE = 60_000  # bytes of the large message; what the coordinator takes at most is a little more


def versions() -> dict[str, str]:
    """The versions of Rolecall, torch (empty where it is not installed) and Python here; torch is not imported."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"rolecall": __version__, "torch": torch, "python": platform.python_version()}


def facts(job: Description, settings: Settings) -> dict[str, Any]:
    """What does not change while a rank runs: its job, versions, fingerprint, and the settings that ranks share."""
    agreement = job.agreement(settings)
    try:
        fingerprint = keys.fingerprint(settings, job.name)
    except (OSError, ValueError):  # of TLS_CA, which has been replaced by something else
        fingerprint = ""
    return {
        "versions": versions(), "job": job.identity, "instance": settings.instance, "fingerprint": fingerprint,
        "digest": agreement.digest, "settings": agreement.values,
    }  # fmt: skip


def serve(app: web.Application, job: Description, settings: Settings, badge: str, gang: Callable[[], Any]) -> None:
    """Adds the routes to `app`: GET answers the facts, the time, and what `gang` returns; POST answers its body. With
    TLS=off a visitor shows `badge`."""
    unchanging = functools.cache(lambda: facts(job, settings))

    def require_member(request: web.Request) -> None:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if badge and not hmac.compare_digest(shown.encode(), badge.encode()):
            raise web.HTTPUnauthorized(text="JOB_TOKEN does not match")

    async def tell(request: web.Request) -> web.Response:
        require_member(request)
        return web.json_response({**unchanging(), "gang": gang(), "unix_s": time.time()})

    async def echo(request: web.Request) -> web.Response:
        require_member(request)
        async with asyncio.timeout(settings.lease_seconds):
            return web.Response(body=await request.read())

    app.add_routes([web.get(PATH, tell), web.post(PATH, echo)])
