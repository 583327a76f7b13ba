"""A supervisor's reply to the query `ReadStacks`: the activity of each thread of its worker, and its pending calls.

The threads are watched for half a second in /proc, which needs no privilege. Then py-spy reads their stacks; if it is
not allowed to, the worker dumps them itself.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import linecache
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.rank.stack_dump import spy_program
from rolecall.rank.threads import Look, look, state
from rolecall.rank.worker_process import WorkerProcess
from rolecall.record.disk import Disk
from rolecall.record.stacks import State

WATCH_SECONDS = 0.5
SPY_TIMEOUT_SECONDS = 4.0
SOURCES_TIMEOUT_SECONDS = 3.0  # for the lines of the frames, which may be on a disk that hangs
_sources = Disk()
MAX_FRAMES = 64  # of a thread
LIBRARIES = ("/site-packages/", f"/lib/python{sys.version_info.major}.{sys.version_info.minor}/")
POOL = "pt_thread_pool"  # the name of RPC's threads
THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<number>[0-9a-f]+)")
FRAME = re.compile(r' {2}File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True)
class Stack:
    """The frames of a thread, the innermost first: function, file, line. `number` is its native ID, or
    the one in Python if that is unknown."""

    number: int
    frames: tuple[tuple[str, str, int], ...]
    name: str = ""
    gil: bool = False


async def describe(worker: WorkerProcess | None) -> dict[str, Any]:
    """The reply for `worker`. `by` is the program that read the stacks, empty if there are none; `note` says why it is
    not py-spy."""
    now = time.monotonic()
    if worker is None or not (pid := worker.pid):
        return {"state": worker.state if worker else "none", "by": "", "note": "", "threads": [], "calls": []}
    before = await asyncio.to_thread(look, pid)
    await asyncio.sleep(WATCH_SECONDS)  # a measurement's length
    after = await asyncio.to_thread(look, pid)
    states = {thread: state(before.get(thread), seen, time.monotonic() - now) for thread, seen in after.items()}
    stopped = bool(after) and all(each == "stopped" for each in states.values())
    stacks, by, note = await _spy(pid, stopped)
    if not stacks and not stopped:
        stacks, by = parse(await worker.dump()), "faulthandler"
    calls = worker.long_calls
    waited = time.monotonic() - (worker.last_heartbeat or now)
    if by == "faulthandler":
        states, numbers = by_python(states, after, calls, stacks, pid), [call[3] for call in calls]
    else:
        numbers = [call[4] for call in calls]
    main = pid if by != "faulthandler" else _main(stacks)
    try:
        threads = await asyncio.wait_for(_sources.run(described, stacks, states, main), SOURCES_TIMEOUT_SECONDS)
    except TimeoutError:
        threads = described(stacks, states, main, sources=False)
    return {
        "state": "stopped" if stopped else worker.state,
        "generation": worker.task.generation,
        "step": worker.step,
        "phase": worker.phase,
        "phase_seconds": round(time.monotonic() - worker.phase_since, 1),
        "silent_seconds": round(waited, 1),
        "rpc_threads": sum(seen.name == POOL for seen in after.values()),
        "by": by if stacks else "",
        "note": note,
        "threads": threads,
        "calls": [
            (readable(call[0]), call[1], round(call[2] + waited, 1), number)
            for call, number in zip(calls, numbers, strict=True)
        ],
    }


def readable(name: str) -> str:
    """`ps 0` for the RPC name `ps_0`."""
    return " ".join(name.rsplit("_", 1))


# ---- watching


def by_python(
    states: Mapping[int, State],
    looks: Mapping[int, Look],
    calls: Iterable[Sequence[Any]],
    stacks: Sequence[Stack],
    pid: int,
) -> dict[int, State]:
    """The states of threads by their IDs in Python, as far as they are known: that of the main thread, and of those
    that have made `calls`. Other RPC threads wait if all of their pool do."""
    native = {call[3]: call[4] for call in calls} | {_main(stacks): pid}
    pool = {states[thread] for thread, seen in looks.items() if seen.name == POOL and thread not in native.values()}
    others: State = "waits" if pool <= {"waits"} else ""
    known = {number: states.get(thread, "") for number, thread in native.items()}
    serving = {each.number for each in stacks if any(function == "_run_function" for function, _, _ in each.frames)}
    return dict.fromkeys(serving, others) | known


# ---- stacks


async def _spy(pid: int, stopped: bool) -> tuple[list[Stack], str, str]:
    """The stacks that py-spy reads, its name, and why there are none."""
    program = spy_program()
    if program is None:
        return [], "", "py-spy is not installed"
    command = [program, "dump", "--json", "--pid", str(pid)]
    if stopped:
        command.append("--nonblocking")  # a stopped process cannot be paused
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    spy = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(spy.communicate(), SPY_TIMEOUT_SECONDS)
        return read_spy(output), "py-spy", "" if not spy.returncode else _problem(errors)
    except TimeoutError:
        return [], "", f"py-spy did not end within {SPY_TIMEOUT_SECONDS:g} s"
    except (ValueError, KeyError, TypeError):
        return [], "", _problem(errors)
    finally:
        if spy.returncode is None:
            spy.kill()
            await spy.wait()


def _problem(errors: bytes) -> str:
    """The first line of py-spy's error."""
    lines = [line.removeprefix("Error: ").strip() for line in errors.decode(errors="replace").splitlines()]
    text = next((line for line in lines if line), "it could not read the stacks")
    return f"py-spy: {text[:200]}"


def read_spy(output: bytes) -> list[Stack]:
    """The stacks of `py-spy dump --json`. Raises ValueError, KeyError or TypeError for anything else."""
    stacks = []
    for thread in json.loads(output):
        frames = tuple((str(each["name"]), str(each["filename"]), int(each["line"] or 0)) for each in thread["frames"])
        number = int(thread["os_thread_id"] or thread["thread_id"])
        stacks.append(Stack(number, frames, str(thread["thread_name"] or ""), bool(thread["owns_gil"])))
    return stacks


def parse(text: str) -> list[Stack]:
    """The stacks of a dump of faulthandler."""
    stacks: list[tuple[int, list[tuple[str, str, int]]]] = []
    for line in text.splitlines():
        if begin := THREAD.match(line):
            stacks.append((int(begin["number"], 16), []))
        elif stacks and (frame := FRAME.match(line)):
            stacks[-1][1].append((frame["function"], frame["file"], int(frame["line"])))
    return [Stack(number, tuple(frames)) for number, frames in stacks]


def _main(stacks: Sequence[Stack]) -> int:
    """The main thread in a dump of faulthandler, which names the newest thread first."""
    return stacks[-1].number if stacks else 0


def described(
    stacks: Iterable[Stack], states: Mapping[int, State], main: int, sources: bool = True
) -> list[dict[str, Any]]:
    """The threads that have frames, for the reply, with the lines of their `sources`."""
    threads = [
        {
            "number": stack.number,
            "name": stack.name,
            "main": stack.number == main,
            "gil": stack.gil,
            "state": states.get(stack.number, ""),
            "frames": [
                (function, _short(file), line, *(_source(file, line) if sources else ("", [])))
                for function, file, line in stack.frames[:MAX_FRAMES]
            ],
        }
        for stack in stacks
    ]
    linecache.clearcache()  # a supervisor stays small
    _statements.cache_clear()
    return threads


def _source(file: str, line: int) -> tuple[str, list[str]]:
    """A line of a file, and what the `with` statements around it are given; those of libraries are not looked for."""
    if not file.endswith(".py"):
        return "", []
    library = any(part in file for part in LIBRARIES)
    within = (
        []
        if library
        else [given for begin, end, given in _statements(file) if begin < line <= end or begin == line == end]
    )
    return linecache.getline(file, line).strip(), within


@functools.cache
def _statements(file: str) -> list[tuple[int, int, str]]:
    """The first line of each `with` statement in a file, its last line, and what it is given."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # the file has changed
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno, ast.unparse(item.context_expr))
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
    ]


@functools.lru_cache(1000)
def _short(file: str) -> str:
    """A file's name from its package on."""
    path = Path(file)
    parent, parts = path.parent, [path.name]
    while path.is_absolute() and parent.name and (parent / "__init__.py").exists():
        parts.insert(0, parent.name)
        parent = parent.parent
    return "/".join(parts)
