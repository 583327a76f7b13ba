"""Asks the ranks of a running job, by rank 0's METRICS_PORT, with requests that JOB_TOKEN signs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.observe import targets
from rolecall.secret import read_token
from rolecall.tunnel import signatures

CONNECT_SECONDS = 10.0  # seconds to connect, and for an answer beyond the query's own deadline


async def ask(
    target: str,
    what: str,
    arguments: dict[str, Any] | None = None,
    to: Collection[str] | None = None,
    timeout: float = 5.0,
) -> dict[str, Any]:
    """The replies of the ranks `to` ("observer_1"), or of all, of the job at `target` to a query, by rank.

    `target` is a TARGET of `rolecall watch`. Raises UsageError if rank 0 is not reached or refuses.
    """
    source = targets.parse(target)
    token = _token(source)  # only now: a folder that lists no run of this machine names no file to read, either
    body = json.dumps({"what": what, "arguments": arguments or {}, "to": to and [*to], "timeout": timeout}).encode()
    parts = urlsplit(source.url)
    headers = {"Authorization": signatures.sign(token, "POST", signatures.ASK_PATH, body)} if token else {}
    limit = aiohttp.ClientTimeout(total=timeout + CONNECT_SECONDS, connect=CONNECT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{parts.scheme}://{parts.netloc}{signatures.ASK_PATH}", data=body, headers=headers) as answer,
        ):
            text = await answer.text()
            if answer.status == 200:
                return dict(json.loads(text))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UsageError(f"TARGET {target!r}: {str(error) or 'no answer in time'}") from error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]
    raise UsageError(f"TARGET {target!r}: {text or f'HTTP status {answer.status}'}")


def _token(target: targets.Target) -> str:
    """The job's token: JOB_TOKEN, or that which `rolecall run` has made for the run in a folder."""
    token = config.load(Settings).token
    if not token and target.folder and (run := targets.run_in(target.folder)) and run.token_file:
        with UsageError.wrap(f"the token of the run in {target.folder}", ValueError):
            token = read_token(Path(run.token_file))
    return token
