"""This process's cgroup, of version 2 or 1: its limits, and whether memory ran out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rolecall.gang.protocol import OUT_OF_MEMORY

MIB = 2**20
UNLIMITED = 2**60  # version 1 writes "no limit" as a number near 2**63


class OomKills(NamedTuple):
    """How many processes of this process's cgroup, and of the machine, the kernel has killed because memory ran out;
    None if it cannot be read."""

    group: int | None
    machine: int | None


@dataclass(frozen=True)
class Cgroup:
    """The cgroup that the file `membership` names, in the file system at `root`. Tests replace the paths."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")
    vmstat: Path = Path("/proc/vmstat")

    def folders(self, controller: str) -> list[Path]:
        """The folders of this process's cgroup and of those around it, the innermost first. A container sees its own as
        the root."""
        places: dict[str, Path] = {}
        with contextlib.suppress(OSError):
            for line in self.membership.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                places.update(dict.fromkeys(controllers.split(","), Path(path.lstrip("/"))))
        unified, old = places.get("", Path()), places.get(controller, Path())
        above = [self.root / part for part in (unified, *unified.parents)]
        return list(dict.fromkeys([*above, *(self.root / controller / part for part in (old, *old.parents))]))

    def least(self, controller: str, *names: str) -> int | None:
        """The smallest number in a file of one of `names`, of all cgroups around this process; None without a limit."""
        return min(self._numbers(controller, *names), default=None)

    def _numbers(self, controller: str, *names: str) -> list[int]:
        numbers = []
        for file in (folder / name for folder in self.folders(controller) for name in names):
            with contextlib.suppress(OSError, ValueError):  # of another version of cgroups, or "max"
                if (number := int(file.read_text())) < UNLIMITED:
                    numbers.append(number)
        return numbers

    def oom_kills(self) -> OomKills:
        """The kernel's counts of now."""
        files = [folder / name for folder in self.folders("memory") for name in ("memory.events", "memory.oom_control")]
        group = next((count for count in map(_oom_kill, files) if count is not None), None)
        return OomKills(group, _oom_kill(self.vmstat))

    def ran_out(self, before: OomKills) -> str:
        """OUT_OF_MEMORY, with the cgroup's limit and peak as far as they can be read, if its count is greater than
        `before`; with a question mark if no count shows that memory did not run out; else empty."""
        now = self.oom_kills()
        if before.group is None or now.group is None or now.group <= before.group:
            unmoved = any(count is not None and count == then for count, then in zip(now, before, strict=True))
            return "" if unmoved else f"{OUT_OF_MEMORY}?"
        limit = self.least("memory", "memory.max", "memory.limit_in_bytes")
        peak = next(iter(self._numbers("memory", "memory.peak", "memory.max_usage_in_bytes")), None)
        sizes = [f"{name} {size // MIB} MiB" for name, size in (("limit", limit), ("peak", peak)) if size]
        return f"{OUT_OF_MEMORY} ({', '.join(sizes)})" if sizes else OUT_OF_MEMORY


def _oom_kill(file: Path) -> int | None:
    """The count of that name in `file`; None if it has none: of another version of cgroups, or an old kernel."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill":
                return int(count)
    return None
