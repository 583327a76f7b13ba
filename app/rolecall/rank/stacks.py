"""The stacks of a worker's threads, for the log: dumped by the worker itself, and by py-spy where that is installed.

A worker that holds the GIL for ever dumps them too, at a signal: faulthandler needs no Python code to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import IO

SIGNAL = signal.SIGRTMIN + 9  # that no program uses for something else
WAIT = 1.0  # seconds for a worker to dump its stacks
NATIVE = 5.0  # seconds for py-spy
MOST = 2**16  # bytes
PR_SET_PTRACER = 0x59616D61  # of prctl(2)
_file: IO[bytes] | None = None  # of this process, where it is a worker


def register(path: str) -> None:
    """Has this process dump its stacks to `path` at SIGNAL. Without a file there are none: the disk may be full. Its
    supervisor may look into it by py-spy."""
    global _file
    with contextlib.suppress(OSError):
        # open for as long as the process lives; a dump goes to its end, also once the supervisor has emptied it
        _file = Path(path).open("a+b", buffering=0)  # noqa: SIM115
        faulthandler.register(SIGNAL, _file, all_threads=True)
    _allow_supervisor()


def _allow_supervisor() -> None:
    """Where Yama allows ptrace to parents only (ptrace_scope 1): also to the supervisor, the parent of the process that
    this one was forked from, and to what it starts."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        supervisor = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(int(supervisor)), 0, 0, 0)


def forget(path: str) -> None:
    """Deletes what an earlier worker has dumped to `path`, if anything."""
    if path:
        Path(path).unlink(missing_ok=True)


def dump() -> str:
    """The stacks of this process's threads; empty where it has no file for them."""
    if _file is None:
        return ""
    _file.seek(0)
    _file.truncate()
    faulthandler.dump_traceback(_file, all_threads=True)
    _file.seek(0)
    return _file.read(MOST).decode(errors="replace")


async def of_silent(pidfd: int, path: str) -> str:
    """The stacks of the worker `pidfd`, which writes them to `path`; empty where it does not within WAIT seconds, such
    as one that is stopped (SIGSTOP)."""
    size = 0
    try:
        os.truncate(path, 0)  # an earlier dump
        signal.pidfd_send_signal(pidfd, SIGNAL)
        for _ in range(20):
            await asyncio.sleep(WAIT / 20)
            before, size = size, os.stat(path).st_size  # noqa: PTH116
            if 0 < size == before:
                break
        return _read(path)
    except OSError:  # it has ended, or has no file
        return ""


def _read(path: str) -> str:
    return Path(path).read_bytes()[:MOST].decode(errors="replace")


def spy_program() -> str | None:
    """py-spy: that of PATH, or the one beside this interpreter, whose environment need not be activated."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


async def native(pid: int) -> str:
    """The stacks of `pid` with native frames; empty where py-spy is not installed, or may not read them."""
    program = spy_program()
    if program is None:
        return ""
    spy = await asyncio.create_subprocess_exec(
        program, "dump", "--native", "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(spy.communicate(), NATIVE)
    except TimeoutError:
        output = b""
    finally:
        if spy.returncode is None:
            spy.kill()
            await spy.wait()
    return output[:MOST].decode(errors="replace")
