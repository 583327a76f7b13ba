"""The stacks of a worker's threads for the log: dumped by the worker itself, or read by py-spy.

At a signal faulthandler dumps them without running Python code, so also while a thread holds the GIL.
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

SIGNAL = signal.SIGRTMIN + 9  # not used by other programs
DUMP_TIMEOUT_SECONDS = 1.0
SPY_TIMEOUT_SECONDS = 4.0
MAX_DUMP_BYTES = 2**16
PR_SET_PTRACER = 0x59616D61  # of prctl(2)
_file: IO[bytes] | None = None  # of this process, if it is a worker


def register(path: str) -> None:
    """Makes this process dump its stacks to `path` at SIGNAL, if the file can be opened, and lets its supervisor read
    its memory by py-spy."""
    global _file
    with contextlib.suppress(OSError):
        # open for as long as the process lives; a dump goes to its end, also once the supervisor has emptied it
        _file = Path(path).open("a+b", buffering=0)  # noqa: SIM115
        faulthandler.register(SIGNAL, _file, all_threads=True)
    _allow_supervisor()


def _allow_supervisor() -> None:
    """If Yama allows ptrace to parents only (ptrace_scope 1), allows it to the supervisor, which is the parent of this
    one's parent, and to its children."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        supervisor = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(int(supervisor)), 0, 0, 0)


def forget(path: str) -> None:
    """Deletes what an earlier worker has dumped to `path`, if anything."""
    if path:
        Path(path).unlink(missing_ok=True)


def dump() -> str:
    """The stacks of this process's threads; empty if it has no file for them."""
    if _file is None:
        return ""
    _file.seek(0)
    _file.truncate()
    faulthandler.dump_traceback(_file, all_threads=True)
    _file.seek(0)
    return _file.read(MAX_DUMP_BYTES).decode(errors="replace")


async def of_silent(pidfd: int, path: str) -> str:
    """The stacks of the worker `pidfd`, which writes them to `path`; empty if it does not in time, such as a stopped
    one (SIGSTOP)."""
    size = 0
    try:
        os.truncate(path, 0)  # an earlier dump
        signal.pidfd_send_signal(pidfd, SIGNAL)
        for _ in range(20):
            await asyncio.sleep(DUMP_TIMEOUT_SECONDS / 20)
            before, size = size, os.stat(path).st_size  # noqa: PTH116
            if 0 < size == before:
                break
        return _read(path)
    except OSError:  # it has ended, or has no file
        return ""


def _read(path: str) -> str:
    return Path(path).read_bytes()[:MAX_DUMP_BYTES].decode(errors="replace")


async def spy(pid: int, *options: str) -> tuple[bytes, str]:
    """The output of `py-spy dump` for `pid`, and why there is none."""
    # that of PATH, or the one beside this interpreter, whose environment need not be activated
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return b"", "py-spy is not installed"
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, "dump", *options, "--pid", str(pid), stdin=null, stdout=pipe, stderr=pipe
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), SPY_TIMEOUT_SECONDS)
    except TimeoutError:
        return b"", f"py-spy did not end within {SPY_TIMEOUT_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not process.returncode:
        return output, ""
    lines = [line.removeprefix("Error: ").strip() for line in errors.decode(errors="replace").splitlines()]
    text = next((line for line in lines if line), "it could not read the stacks")
    return output, f"py-spy: {text[:200]}"


async def native(pid: int) -> str:
    """The stacks of `pid` with native frames; empty if py-spy is not installed, or may not read them."""
    output, _ = await spy(pid, "--native")
    return output[:MAX_DUMP_BYTES].decode(errors="replace")
