"""Asks the peer of a call that has passed its deadline for its stacks, and logs them."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

from rolecall import telemetry
from rolecall.errors import CallTimeoutError, PeerLostError

EXAMINE_SECONDS = 2.0  # that a call may take past its deadline, to ask the peer what it does
MAX_STACKS_CHARS = 8_000
HANDLER = "rolecall/wire/dispatch.py"  # the file of the frame that calls a method


def judge(
    late: CallTimeoutError, *, to: str, method: str, setting: str, seconds: float, stacks: str | None
) -> Exception:
    """Logs a call that is `late`, with the `stacks` of its peer. Returns the error to raise: `late`, or a PeerLostError
    if the peer has not sent its stacks either."""
    error: Exception = late
    if stacks is None:
        error = PeerLostError(f"{late}, nor sends its stacks: it is frozen or cut off")
        error.__cause__ = late
    details: dict[str, Any] = (
        {"exception": f"stacks of {to}:\n{stacks}"} if stacks else {"stacks": "none: the peer does not answer"}
    )
    telemetry.log().warning("call timed out", peer=to, function=method, deadline_s=seconds, setting=setting, **details)
    return error


def stacks_of(method: str) -> str:
    """The stacks of the threads that run the called `method`, without the wire's frames. If none runs it: of all
    threads that serve calls, and of the main thread, which runs methods with `turn`."""
    running, others = list[str](), list[str]()
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = traceback.extract_stack(innermost)
        place = max((n for n, each in enumerate(frames) if each.filename.endswith(HANDLER)), default=-1)
        main = ident == threading.main_thread().ident
        if place < 0 and not main:
            continue
        title = "main thread" if main else "thread that serves a call"
        text = "".join([f"{title} (most recent call last):\n", *traceback.format_list(frames[place + 1 :])])
        (running if any(each.name == method for each in frames) else others).append(text)
    return "\n".join(running or others)[:MAX_STACKS_CHARS]
