"""Keeps freed memory in the process."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed_memory(most: int) -> None:
    """Has glibc keep up to `most` bytes of freed memory for new tensors, and what is larger than half of that, not at
    all. Without effect on other C libraries.

    A worker keeps 512 MiB: by default glibc returns megabytes to the system and requests them again at every step, page
    by page, which takes a fifth of a step of the ConvNet. A process that must stay within a limit keeps less: what is
    kept between smaller things leaves gaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, most // 2)
        mallopt(M_TRIM_THRESHOLD, most)
        mallopt(M_ARENA_MAX, 1)  # another thread's own arena holds nothing of 64 MiB, and keeps no more than that
