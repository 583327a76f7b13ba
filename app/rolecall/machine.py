"""What this process may use of its machine."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, capped by a container's CPU limit (cgroup v2 or v1)."""
    count = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # another version, or no limit ("max")
            quota, period = (int(word) for file in files for word in (cgroup / file).read_text().split())
            if quota > 0:
                count = min(count, math.ceil(quota / period))
    return count
