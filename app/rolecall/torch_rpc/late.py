"""Calls that have passed their deadline: the called peer is asked what it does, for the log."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.context.pace import Deadline
from rolecall.context.peers import EXAMINED
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.record.stacks import HANDLER

MOST = 8_000  # characters of stacks


def examine(to: str, method: str, deadline: Deadline, late: CallTimeoutError, then: Callable[[Exception], Any]) -> None:
    """Logs a call that is `late`, with what its peer does. `then` gets the error, from another thread: that one, or a
    PeerLostError if the peer does not say either what it does."""

    def told(reply: torch.futures.Future[str] | None) -> None:
        error: Exception = late
        stacks = ""
        try:
            if reply is not None:
                stacks = reply.value()
        except Exception:  # of any kind: then nothing is known of the peer
            reply = None
        if reply is None:
            error = PeerLostError(
                f"{late}, nor says what it does: it is frozen or cut off, or all its RPC threads work"
            )
            error.__cause__ = late
        telemetry.log().warning(
            "call timed out", peer=to, function=method, deadline_s=float(deadline), setting=deadline.setting,
            **({"exception": f"stacks of {to}:\n{stacks}"} if stacks else {"stacks": "none: the peer does not answer"}),
        )  # fmt: skip
        then(error)

    try:
        asked = rpc.rpc_async(to, stacks_of, args=(method,), timeout=EXAMINED)
    except RuntimeError:  # its connection is gone
        told(None)
    else:
        asked.add_done_callback(told)


def stacks_of(method: str) -> str:
    """The stacks of the threads that run the called function `method` here, without torch's frames; if none does, of
    all that serve calls, and of the main thread, which may be to run it."""
    running, others = list[str](), list[str]()
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = traceback.extract_stack(innermost)
        place = next(
            (n for n, each in enumerate(frames) if each.name == HANDLER[0] and HANDLER[1] in each.filename), -1
        )
        main = ident == threading.main_thread().ident
        if place < 0 and not main:
            continue
        title = "main thread" if main else "thread that serves a call"
        text = "".join([f"{title} (most recent call last):\n", *traceback.format_list(frames[place + 1 :])])
        (running if any(each.name == method for each in frames) else others).append(text)
    return "\n".join(running or others)[:MOST]
