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
from pathlib import Path

from msgspec.structs import replace

from rolecall.observe.stacks.threads import Call, Frame, Rank, State, Thread
from rolecall.rank import stack_dump
from rolecall.rank.threads import look, state
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.files import Disk

WATCH_SECONDS = 0.5
SOURCES_TIMEOUT_SECONDS = 3.0  # for the lines of the frames, which may be on a disk that hangs
_sources = Disk()
MAX_FRAMES = 64  # of a thread


async def describe(worker: WorkerProcess | None) -> Rank:
    """The reply for `worker`."""
    now = time.monotonic()
    if worker is None or not (pid := worker.pid):
        return Rank(state=worker.life.state if worker else "none")
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
    calls = (Call(to, method, round(took + waited, 1), thread) for to, method, took, thread in life.long_calls)
    return Rank(
        threads=threads,
        calls=tuple(calls),
        state="stopped" if stopped else life.state,
        note=note,
        generation=life.generation,
        step=life.step,
        phase=life.phase,
        phase_seconds=round(time.monotonic() - life.phase_since, 1),
        silent_seconds=round(waited, 1),
    )


# ---- stacks


async def _spy(pid: int, stopped: bool) -> tuple[list[Thread], str]:
    """The stacks that py-spy reads, and why there are none."""
    # a stopped process cannot be paused
    output, note = await stack_dump.spy(pid, "--json", *(["--nonblocking"] if stopped else []))
    try:
        return read_spy(output), note
    except (ValueError, KeyError, TypeError):
        return [], note or "py-spy: it could not read the stacks"


def read_spy(output: bytes) -> list[Thread]:
    """The threads of `py-spy dump --json`. Raises ValueError, KeyError or TypeError for anything else."""
    threads = []
    for thread in json.loads(output):
        frames = (Frame(str(one["name"]), str(one["filename"]), int(one["line"] or 0)) for one in thread["frames"])
        number = int(thread["os_thread_id"] or thread["thread_id"])
        name = str(thread["thread_name"] or "")
        threads.append(Thread(number, tuple(frames), gil=bool(thread["owns_gil"]), name=name))
    return threads


def described(stacks: Iterable[Thread], states: Mapping[int, State], main: int, sources: bool) -> tuple[Thread, ...]:
    """The threads that have frames, for the reply, with the lines of their `sources`."""
    threads = []
    for stack in stacks:
        frames = (
            replace(
                frame,
                file=_short(frame.file),
                text=linecache.getline(frame.file, frame.line).strip() if sources else "",
            )
            for frame in stack.frames[:MAX_FRAMES]
        )
        state, is_main = states.get(stack.number, ""), stack.number == main
        threads.append(replace(stack, frames=tuple(frames), state=state, main=is_main))
    linecache.clearcache()  # a supervisor stays small
    return tuple(threads)


@functools.lru_cache(1000)
def _short(file: str) -> str:
    """A file's name from its package on."""
    path = Path(file)
    parent, parts = path.parent, [path.name]
    while path.is_absolute() and parent.name and (parent / "__init__.py").exists():
        parts.insert(0, parent.name)
        parent = parent.parent
    return "/".join(parts)
