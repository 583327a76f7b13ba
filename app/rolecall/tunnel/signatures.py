"""Requests that are signed with a key derived from JOB_TOKEN.

Neither the token nor the key is sent, and a request cannot be replayed, so plain HTTP suffices. The header
`Authorization: Rolecall TIME NONCE SIGNATURE` has the time in Unix seconds. The signature is the HMAC-SHA256 (RFC
2104), in hex, of five lines: TIME, NONCE, method, path, and the SHA-256 of the body, in hex. The key is
`keys.signing_key`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rolecall.tunnel import keys

ASK_PATH = "/v1/ask"
SCHEME = "Rolecall"
MAX_CLOCK_SKEW = 60.0  # seconds
MAX_REQUESTS = 10_000  # in twice that time


class DeniedError(Exception):
    """A request that is refused; the text is the reason."""


def sign(token: str, method: str, path: str, body: bytes, now: float | None = None) -> str:
    """The header `Authorization` that signs a request at `now` (Unix seconds) with `token`."""
    moment, nonce = f"{time.time() if now is None else now:.3f}", secrets.token_hex(16)
    return f"{SCHEME} {moment} {nonce} {_signature(keys.signing_key(token), (moment, nonce, method, path), body)}"


def _signature(key: bytes, lines: Sequence[str], body: bytes) -> str:
    text = "\n".join([*lines, hashlib.sha256(body).hexdigest()])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


class SignatureChecker:
    """Checks signed requests. Without a `token` it refuses all. `clock` is in Unix seconds."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._key = keys.signing_key(token) if token else b""
        self._clock, self._began = clock, clock()
        self._seen: OrderedDict[str, float] = OrderedDict()

    def check(self, header: str, method: str, path: str, body: bytes) -> None:
        """Raises DeniedError unless `header` signs this request, now and for the first time."""
        if not self._key:
            raise DeniedError("the job has no JOB_TOKEN, with which such requests are signed")
        match header.split():
            case [scheme, moment, nonce, signature] if scheme == SCHEME and len(nonce) <= 64:
                pass
            case _:
                raise DeniedError("the request is not signed; give this command the job's JOB_TOKEN")
        if not hmac.compare_digest(_signature(self._key, (moment, nonce, method, path), body), signature):
            raise DeniedError("JOB_TOKEN does not match")
        now, signed = self._clock(), float(moment)
        if not abs(now - signed) <= MAX_CLOCK_SKEW:
            raise DeniedError(f"the clocks differ by {abs(now - signed):.0f} s; at most {MAX_CLOCK_SKEW:g} s may be")
        if signed < self._began - 1.0:  # earlier requests are not remembered; clocks differ a little
            raise DeniedError("the request was signed before rank 0 started; send it again")
        while self._seen and next(iter(self._seen.values())) < now - 2 * MAX_CLOCK_SKEW:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise DeniedError("the request was sent before")
        if len(self._seen) >= MAX_REQUESTS:
            raise DeniedError(f"more than {MAX_REQUESTS} requests in {2 * MAX_CLOCK_SKEW:g} s")
        self._seen[nonce] = now
