"""`python -m rolecall.launch.on_node JOB RANK [PART]`: kills a rank's processes on this node of a job of Slurm."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence

import psutil

from rolecall import config, machine


def kill(job: str, rank: str, part: str, of_slurm: str) -> list[str]:
    """Kills the processes of a `rank`, or those that are `part`, in the job `of_slurm`; its first process starts them
    again. Returns what was killed."""
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if not machine.is_named(process, job, rank, machine.SUPERVISOR):
                continue
            variables = process.environ()
            if of_slurm not in (variables.get("SLURM_JOB_ID"), variables.get("SLURM_HET_JOB_ID")):
                continue
            for name, each in machine.parts(process.pid):
                if part in ("", name):
                    each.kill()
                    killed.append(f"{name} {each.pid}")
    return killed


def main(words: Sequence[str]) -> None:
    """Runs the command with `words`."""
    job, rank, part = [*words, ""][:3]
    of_slurm = config.exported("SLURM_HET_JOB_ID") or config.exported("SLURM_JOB_ID")
    if killed := kill(job, rank, part, of_slurm):
        print(f"killed {rank} on {socket.gethostname()}: {', '.join(killed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
