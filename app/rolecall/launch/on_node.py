"""`python -m rolecall.launch.on_node NUMBER JOB RANK [PART]`: kills a rank's processes on this node of the job, or the
component, with that number of Slurm's."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

import psutil

from rolecall import machine

LIST_SECONDS = 30.0  # for Slurm to list the processes


def kill(job: str, rank: str, part: str, tasks: Iterable[int]) -> list[str]:
    """Kills the processes of a `rank`, or those that are `part`, below those of `tasks`; its first process starts them
    again. Returns what was killed."""
    killed = dict[int, str]()
    for task in tasks:
        with contextlib.suppress(psutil.Error):  # it has ended
            for process in psutil.Process(task).children(recursive=True):
                if machine.is_named(process, job, rank, machine.SUPERVISOR):
                    for name, each in machine.parts(process.pid):
                        if part in ("", name):
                            each.kill()
                            killed[each.pid] = f"{name} {each.pid}"
    return [*killed.values()]


def main(words: Sequence[str]) -> None:
    """Runs the command with `words`."""
    number, job, rank, part = [*words, ""][:4]
    listed = subprocess.run(
        ["scontrol", "listpids", number],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIST_SECONDS,
        check=True,
    ).stdout
    tasks = {int(line.split()[0]) for line in listed.splitlines() if line[:1].isdecimal()}
    if killed := kill(job, rank, part, tasks):
        print(f"killed {rank} on {socket.gethostname()}: {', '.join(killed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
