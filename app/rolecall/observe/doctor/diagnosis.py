"""Rank 0's answer to `rolecall doctor`, by the channel of heartbeats: versions, clock, what ranks must agree on."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rolecall import machine
from rolecall.config import Settings, __version__
from rolecall.declare.describe import Description
from rolecall.tunnel import keys


def versions() -> dict[str, str]:
    """The versions of Rolecall, torch (empty if it is not installed) and Python here; torch is not imported."""
    return {"rolecall": __version__, **machine.versions()._asdict()}


def facts(job: Description, settings: Settings) -> dict[str, Any]:
    """Facts that do not change while a rank runs: job, versions, fingerprint, and the settings in common."""
    agreement = job.agreement(settings)
    try:
        fingerprint = keys.fingerprint(settings, job.name)
    except (OSError, ValueError):  # TLS_CA was replaced
        fingerprint = ""
    return {
        "versions": versions(),
        "job": job.identity,
        "fingerprint": fingerprint,
        "settings": agreement.values,
    }


def answer(
    job: Description, settings: Settings, gang: Callable[[], Any]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler of a doctor's requests: the facts, the time, and what `gang` returns."""
    unchanging = functools.cache(lambda: facts(job, settings))

    async def handle(_: web.Request) -> web.Response:
        return web.json_response({**unchanging(), "gang": gang(), "unix_s": time.time()})

    return handle
