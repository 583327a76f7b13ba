"""A supervisor's reply to the query `ReadStacks`: the activity of each thread of its worker, and its pending calls.

The threads are watched for half a second in /proc, which needs no privilege. Then py-spy reads their stacks.
"""

from __future__ import annotations

import asyncio
import functools
import json
import linecache
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.rank import stack_dump
from rolecall.rank.threads import look, state
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.disk import Disk
from rolecall.record.stacks import State

WATCH_SECONDS = 0.5
SOURCES_TIMEOUT_SECONDS = 3.0  # for the lines of the frames, which may be on a disk that hangs
_sources = Disk()
MAX_FRAMES = 64  # of a thread


@dataclass(frozen=True)
class Stack:
    """The frames of a thread, the innermost first: function, file, line. `number` is its native ID."""

    number: int
    frames: tuple[tuple[str, str, int], ...]
    name: str = ""
    gil: bool = False


async def describe(worker: WorkerProcess | None) -> dict[str, Any]:
    """The reply for `worker`. `note` says why there are no stacks."""
    now = time.monotonic()
    if worker is None or not (pid := worker.pid):
        return {"state": worker.life.state if worker else "none", "note": "", "threads": [], "calls": []}
    life, before = worker.life, await asyncio.to_thread(look, pid)
    await asyncio.sleep(WATCH_SECONDS)  # a measurement's length
    after = await asyncio.to_thread(look, pid)
    states = {thread: state(before.get(thread), seen, time.monotonic() - now) for thread, seen in after.items()}
    stopped = bool(after) and all(each == "stopped" for each in states.values())
    stacks, note = await _spy(pid, stopped)
    waited = time.monotonic() - (worker.life.last_heartbeat or now)
    try:
        threads = await asyncio.wait_for(_sources.run(described, stacks, states, pid, True), SOURCES_TIMEOUT_SECONDS)
    except TimeoutError:
        threads = described(stacks, states, pid, sources=False)
    return {
        "state": "stopped" if stopped else life.state,
        "generation": life.generation,
        "step": life.step,
        "phase": life.phase,
        "phase_seconds": round(time.monotonic() - life.phase_since, 1),
        "silent_seconds": round(waited, 1),
        "note": note,
        "threads": threads,
        "calls": [
            (to, method, round(seconds + waited, 1), thread) for to, method, seconds, _, thread in life.long_calls
        ],
    }


# ---- stacks


async def _spy(pid: int, stopped: bool) -> tuple[list[Stack], str]:
    """The stacks that py-spy reads, and why there are none."""
    # a stopped process cannot be paused
    output, note = await stack_dump.spy(pid, "--json", *(["--nonblocking"] if stopped else []))
    try:
        return read_spy(output), note
    except (ValueError, KeyError, TypeError):
        return [], note or "py-spy: it could not read the stacks"


def read_spy(output: bytes) -> list[Stack]:
    """The stacks of `py-spy dump --json`. Raises ValueError, KeyError or TypeError for anything else."""
    stacks = []
    for thread in json.loads(output):
        frames = tuple((str(each["name"]), str(each["filename"]), int(each["line"] or 0)) for each in thread["frames"])
        number = int(thread["os_thread_id"] or thread["thread_id"])
        stacks.append(Stack(number, frames, str(thread["thread_name"] or ""), bool(thread["owns_gil"])))
    return stacks


def described(stacks: Iterable[Stack], states: Mapping[int, State], main: int, sources: bool) -> list[dict[str, Any]]:
    """The threads that have frames, for the reply, with the lines of their `sources`."""
    threads = [
        {
            "number": stack.number,
            "name": stack.name,
            "main": stack.number == main,
            "gil": stack.gil,
            "state": states.get(stack.number, ""),
            "frames": [
                (function, _short(file), line, linecache.getline(file, line).strip() if sources else "")
                for function, file, line in stack.frames[:MAX_FRAMES]
            ],
        }
        for stack in stacks
    ]
    linecache.clearcache()  # a supervisor stays small
    return threads


@functools.lru_cache(1000)
def _short(file: str) -> str:
    """A file's name from its package on."""
    path = Path(file)
    parent, parts = path.parent, [path.name]
    while path.is_absolute() and parent.name and (parent / "__init__.py").exists():
        parts.insert(0, parent.name)
        parent = parent.parent
    return "/".join(parts)
