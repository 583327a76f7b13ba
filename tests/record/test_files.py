"""Disk work beside an event loop: in order, and never what keeps a process from ending."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from rolecall.record.files import Disk

HANGING = """
import asyncio, contextlib, time
from rolecall.record.files import Disk

async def main():
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await Disk().run(time.sleep, 1000)

asyncio.run(main())
"""


def test_a_process_ends_while_its_disk_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGING], timeout=60, check=True)


def test_work_is_done_in_order_and_dropped_where_nobody_waits_for_it() -> None:
    disk, goes_on, done = Disk(), threading.Event(), list[int]()

    def hang() -> None:
        goes_on.wait(30)
        done.append(1)

    async def steps() -> None:
        tasks = [asyncio.create_task(disk.run(hang)), *(asyncio.create_task(disk.run(done.append, n)) for n in (2, 3))]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        goes_on.set()
        await tasks[2]
        with pytest.raises(ZeroDivisionError):
            await disk.run(divmod, 1, 0)

    asyncio.run(steps())
    assert done == [1, 3]
    disk.close()
