"""How often the kernel killed a process of this rank's cgroup because memory ran out."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def oom_kills(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """The counter `oom_kill` of this process's cgroup, version 2 or 1; None where there is none to be read."""
    for file in _files(root, membership):
        with contextlib.suppress(OSError, ValueError):  # another version, or an old kernel
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def _files(root: Path, membership: Path) -> list[Path]:
    """Where the counter may be: below this process's own path, or at the root, which a container sees as its own."""
    folders: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folders.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    unified, memory = folders.get("", ""), folders.get("memory", "")
    files = [root / unified / "memory.events", root / "memory.events",
             root / "memory" / memory / "memory.oom_control", root / "memory" / "memory.oom_control"]  # fmt: skip
    return list(dict.fromkeys(files))
