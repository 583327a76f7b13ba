"""The page as HTML: rank 0 serves it during a run; of a run that is over it is one file.

The state is embedded as data, which no browser reads as markup; the page's script shows it as text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from rolecall.record import rundir

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# the page loads nothing from elsewhere, sends nothing, and the script makes no markup of text
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
MARKUP = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


def headers() -> dict[str, str]:
    """The headers of the live page."""
    policy = _policy("'self'") + "; frame-ancestors 'none'"
    return {**HEADERS, "Content-Security-Policy": policy, "X-Frame-Options": "DENY"}


def live(state: dict[str, Any]) -> str:
    """The page that follows a run from `state` on; see `headers`."""
    return _fill(state, "")


def saved(state: dict[str, Any]) -> str:
    """The page of a run that is over, as one file that sends no requests."""
    policy = html.escape(_policy("'none'"))
    return _fill(state, f'<meta http-equiv="Content-Security-Policy" content="{policy}">')


@functools.cache
def _policy(connect: str) -> str:
    """The policy, which allows the template's script and style alone, by their digests."""
    parts = (re.search(rf"<{tag}>(.*?)</{tag}>", _template(), re.DOTALL) for tag in ("script", "style"))
    script, style = (_hash(match.group(1)) for match in parts if match)
    return POLICY.format(script=script, style=style, connect=connect)


def write(directory: Path, state: dict[str, Any]) -> None:
    """Writes page.html. Raises OSError."""
    rundir.write_atomically(directory / rundir.PAGE, saved(state).encode())


def _fill(state: dict[str, Any], policy: str) -> str:
    job = state["job"]["job"]
    values = {
        "policy": policy,
        "title": html.escape(f"{job}: {state['state']}"),
        "state": json.dumps(state, allow_nan=False).translate(MARKUP),
    }
    return PLACEHOLDER.sub(lambda match: values[match.group(1)], _template())


@functools.cache
def _template() -> str:
    return (resources.files("rolecall.observe.page") / "page.html").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
