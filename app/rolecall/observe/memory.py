"""The memory of this rank's cgroup: whether it ran out, its limit and its peak."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rolecall.gang.protocol import OUT_OF_MEMORY

CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIB = 2**20
UNLIMITED = 2**60  # bytes: version 1 writes "no limit" as a number near 2**63


def oom_kills(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """How many processes of this process's cgroup (version 2 or 1) the kernel killed because memory ran out; None if
    the counter cannot be read."""
    for folder in _folders(root, membership):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):  # another version, or an old kernel
                for line in (folder / name).read_text().splitlines():
                    word, _, count = line.partition(" ")
                    if word == "oom_kill":
                        return int(count)
    return None


def ran_out(before: int | None, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> str:
    """OUT_OF_MEMORY, with the cgroup's limit and peak as far as they can be read, if `oom_kills` is greater than
    `before`; else empty."""
    now = oom_kills(root, membership)
    if before is None or now is None or now <= before:
        return ""
    limit = _bytes(root, membership, "memory.max", "memory.limit_in_bytes")
    peak = _bytes(root, membership, "memory.peak", "memory.max_usage_in_bytes")
    sizes = [f"{name} {size // MIB} MiB" for name, size in (("limit", limit), ("peak", peak)) if size]
    return f"{OUT_OF_MEMORY} ({', '.join(sizes)})" if sizes else OUT_OF_MEMORY


def _bytes(root: Path, membership: Path, *names: str) -> int:
    """The first of the files `names` that holds a number of bytes; 0 if none does."""
    for folder in _folders(root, membership):
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # another version, an old kernel, or no limit ("max")
                if (size := int((folder / name).read_text())) < UNLIMITED:
                    return size
    return 0


def _folders(root: Path, membership: Path) -> list[Path]:
    """The folders that may hold the files: this process's own path, or the root, which a container sees as its own."""
    folders: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folders.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    unified, memory = folders.get("", ""), folders.get("memory", "")
    return list(dict.fromkeys([root / unified, root, root / "memory" / memory, root / "memory"]))
