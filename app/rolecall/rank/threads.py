"""Watches the threads of a process in /proc, which needs no privilege: which compute, and which wait."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rolecall.observe.stacks.threads import State

BUSY = 0.2  # the share of the time for which a thread computes
TICK = 0.01  # seconds: USER_HZ of Linux is 100


@dataclass(frozen=True)
class Look:
    """A thread in /proc: its name, its kernel state, ticks of a CPU, switches, and what it waits for in the kernel."""

    name: str
    state: str
    ticks: int
    switches: int
    channel: str


def look(pid: int) -> dict[int, Look]:
    """The threads of a process, by native ID; none if it has exited."""
    looks: dict[int, Look] = {}
    try:
        folders = [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return looks
    for folder in folders:
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            fields = rest.split()
            status = (folder / "status").read_text()
            switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
        except (OSError, ValueError, IndexError):  # it ended just now
            continue
        looks[int(folder.name)] = Look(
            name.partition("(")[2], fields[0], int(fields[11]) + int(fields[12]), switches, _channel(folder / "wchan")
        )
    return looks


def _channel(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not allowed
        return ""


def state(before: Look | None, after: Look, seconds: float) -> State:
    """What a thread has done between two looks."""
    if after.state in "tT":
        return "stopped"
    if before is None:
        return "moves"
    if (after.ticks - before.ticks) * TICK >= BUSY * seconds:
        return "computes"
    if after.switches != before.switches or after.state == "R":
        return "moves"
    if "nanosleep" in after.channel:
        return "sleeps"
    if after.state == "D" or (after.channel not in ("", "0") and "futex" not in after.channel):
        return "input"
    return "waits"
