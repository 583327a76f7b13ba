"""Asks the peer of a call that has passed its deadline for its stacks, and logs them."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.context.group import EXAMINE_SECONDS
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.record.stacks import HANDLER
from rolecall.wire.messages import Deadline

MAX_STACKS_CHARS = 8_000


def examine(to: str, method: str, deadline: Deadline, late: CallTimeoutError, then: Callable[[Exception], Any]) -> None:
    """Logs a call that is `late`, with the stacks of its peer. Calls `then`, from another thread, with the error:
    `late`, or a PeerLostError if the peer does not send its stacks either."""

    def replied(reply: torch.futures.Future[str] | None) -> None:
        error: Exception = late
        stacks = ""
        try:
            if reply is not None:
                stacks = reply.value()
        except Exception:  # of any kind: the peer did not reply
            reply = None
        if reply is None:
            error = PeerLostError(
                f"{late}, nor sends its stacks: it is frozen or cut off, or all its RPC threads are busy"
            )
            error.__cause__ = late
        telemetry.log().warning(
            "call timed out",
            peer=to,
            function=method,
            deadline_s=float(deadline),
            setting=deadline.setting,
            **({"exception": f"stacks of {to}:\n{stacks}"} if stacks else {"stacks": "none: the peer does not answer"}),
        )
        then(error)

    try:
        asked = rpc.rpc_async(to, stacks_of, args=(method,), timeout=EXAMINE_SECONDS)
    except RuntimeError:  # its connection is gone
        replied(None)
    else:
        asked.add_done_callback(replied)


def stacks_of(method: str) -> str:
    """The stacks of the threads that run the called function `method`, without torch's frames. If none runs it: of all
    threads that serve calls, and of the main thread, which runs `in_turn` functions."""
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
    return "\n".join(running or others)[:MAX_STACKS_CHARS]
