"""The stacks of the threads and coroutines that run a called method, for a caller whose deadline has passed."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import weakref
from collections import Counter
from types import FrameType
from typing import Any

EXAMINE_SECONDS = 2.0  # that a call may take past its deadline, to ask the peer what it does
MAX_STACKS_CHARS = 8_000
loops = weakref.WeakSet[asyncio.AbstractEventLoop]()  # that run `async` methods
HANDLER = "rolecall/wire/dispatch.py"  # the file of the frame that calls a method


def stacks_of(method: str) -> str:
    """The stacks of the threads and coroutines that run the called `method`, without the wire's frames; equal ones
    once, with their number. If none runs it: of all that serve calls, and of the main thread, which runs methods with
    `turn`."""
    running, others = Counter[str](), Counter[str]()

    def take(title: str, frames: list[traceback.FrameSummary]) -> None:
        text = "".join([f"{title} (most recent call last):\n", *traceback.format_list(frames)])
        (running if any(each.name == method for each in frames) else others)[text] += 1

    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames = traceback.extract_stack(innermost)
        place = max((n for n, each in enumerate(frames) if each.filename.endswith(HANDLER)), default=-1)
        main = ident == threading.main_thread().ident
        if place >= 0 or main:
            take("main thread" if main else "thread that serves a call", frames[place + 1 :])
    for loop in list(loops):
        for task in asyncio.all_tasks(loop):
            if waiting := _waiting_frames(task.get_coro()):
                take("async method", waiting)
    shown = [text if times == 1 else f"{times} times: {text}" for text, times in (running or others).items()]
    return "\n".join(shown)[:MAX_STACKS_CHARS]


def _waiting_frames(coroutine: Any) -> list[traceback.FrameSummary]:
    """The frames of a coroutine that waits, the outermost first, without the wire's; none of one that runs, which its
    thread's stack has."""
    frames = list[tuple[FrameType, int]]()
    while frame := getattr(coroutine, "cr_frame", None):
        if coroutine.cr_running:
            return []
        if not frame.f_code.co_filename.endswith(HANDLER):
            frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return list(traceback.StackSummary.extract(iter(frames)))
