"""Memory that was freed is kept, or goes back."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

BLOCKS = """
import ctypes, psutil
from rolecall.context.memory import keep_freed_memory
keep_freed_memory({most})
libc, process = ctypes.CDLL(None), psutil.Process()
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = process.memory_info().rss
blocks = [libc.malloc(2**22) for _ in range(16)]
for block in blocks:
    ctypes.memset(block, 1, 2**22)
for block in blocks:
    libc.free(block)
print((process.memory_info().rss - before) // 2**20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(("most", "least", "limit"), [(2**29, 60, 70), (2**21, 0, 4)])
def test_so_much_is_kept_and_no_more(most: int, least: int, limit: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS.format(most=most)], capture_output=True, text=True, timeout=60, check=True
    )
    assert least <= int(done.stdout) <= limit
