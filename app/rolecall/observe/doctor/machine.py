"""Checks of what this machine, or the container's cgroup, gives a rank: files, processes, cores, memory."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from rolecall import machine
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import shown
from rolecall.observe.memory import oom_kills

FEWEST_FILES, FILES_OF_A_RANK = 256, 16  # open files that a rank needs, and more for each other rank
FEWEST_PROCESSES = 128  # threads: a tunnel has 35, a worker those of torch and RPC
SMALLEST_MEMORY = 512 * 2**20  # bytes: a rank whose worker has imported torch
LITTLE_MEMORY = 128 * 2**20  # bytes left beside a rank that runs
THROTTLED = 0.1  # of the periods


def files(patient: Patient) -> Finding:
    """The limit of open files, to which a rank raises its own."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FEWEST_FILES + FILES_OF_A_RANK * (patient.job.ranks if patient.job else 1)
    if most == resource.RLIM_INFINITY:
        return ok("open files are not limited")
    text = f"{soft} open files, which a rank raises to {most}" if soft < most else f"{most} open files"
    return problem(f"{text}; it needs about {needed}") if most < needed else ok(text)


def processes(patient: Patient) -> Finding:
    """Limits of processes and threads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit, used = smallest(patient, "pids", "pids.max"), smallest(patient, "pids", "pids.current") or 0
    if os.geteuid() and soft != resource.RLIM_INFINITY and (limit is None or soft < limit):
        text, left = f"{soft} processes and threads for this user (ulimit)", soft
    elif limit is not None:
        text, left = f"{used} of {limit} processes and threads in this cgroup", limit - used
    else:
        return ok("processes and threads are not limited")
    if left < FEWEST_PROCESSES and not patient.runs:
        return problem(f"{text}; a rank needs about {FEWEST_PROCESSES}")
    return warning(text) if left < FEWEST_PROCESSES / 4 else ok(text)


def cores(patient: Patient) -> Finding:
    """Cores, against THREADS and the cgroup's quota."""
    usable, there = machine.cores(patient.cgroup), os.cpu_count() or 1
    text = f"{usable} of {there} cores may be used"
    if patient.settings.threads > usable:
        return warning(f"{text}; THREADS={patient.settings.threads} are more", "lower THREADS, or raise the CPU limit")
    throttled, periods = (statistic(patient, name) for name in ("nr_throttled", "nr_periods"))
    if periods and throttled / periods > THROTTLED:
        return warning(f"{text}; the limit has stopped them in {100 * throttled / periods:.0f} % of the periods")
    return ok(text)


def memory(patient: Patient) -> Finding:
    """Memory: the cgroup's limit, what is used, and what the kernel has killed."""
    there = psutil.virtual_memory()
    limit = smallest(patient, "memory", "memory.max", "memory.limit_in_bytes")
    if limit is None or limit > there.total:
        limit, left = there.total, there.available
        text = f"{shown(left)} of {shown(limit)} are free, without a limit"
    else:
        used = smallest(patient, "memory", "memory.current", "memory.usage_in_bytes") or 0
        left = min(limit - used + cache(patient), there.available)
        text = f"{shown(left)} are left of the limit of {shown(limit)} ({shown(there.total)} in the machine)"
    if limit < SMALLEST_MEMORY or (left < SMALLEST_MEMORY and not patient.runs):
        return warning(f"{text}; a rank that has imported torch takes about {shown(SMALLEST_MEMORY)}")
    if killed := oom_kills(patient.cgroup, patient.proc / "self" / "cgroup"):
        return warning(f"{text}; the kernel has killed {killed} here because memory ran out")
    return warning(text) if left < LITTLE_MEMORY else ok(text)


def folders(patient: Patient, controller: str) -> Iterator[Path]:
    """The folders that say something of this process's cgroup, version 2 or 1, from its own up to the root."""
    inside: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (patient.proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    for root, path in ((patient.cgroup, inside.get("", "")), (patient.cgroup / controller, inside.get(controller, ""))):
        folder = root / path if ".." not in path else root
        while True:
            yield folder
            if folder == root:
                break
            folder = folder.parent


def smallest(patient: Patient, controller: str, *names: str) -> int | None:
    """The smallest number that a file of one of `names` holds, of all the cgroups around this process; None where none
    has a number."""
    numbers = []
    for folder in folders(patient, controller):
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # another version, or "max"
                numbers.append(int((folder / name).read_text()))
    return min(numbers, default=None)


def statistic(patient: Patient, name: str) -> int:
    """A number of this process's cpu.stat; 0 where there is none."""
    return _number(patient, "cpu", "cpu.stat", name)


def cache(patient: Patient) -> int:
    """Bytes of files that the kernel keeps in this cgroup's memory, and drops where it is needed."""
    return _number(patient, "memory", "memory.stat", "inactive_file")


def _number(patient: Patient, controller: str, file: str, name: str) -> int:
    for folder in folders(patient, controller):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / file).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    return 0


CHECKS = (
    Check(
        "open files",
        "the hard limit of open files, against the number of ranks",
        "raise it: `ulimits` in compose, `LimitNOFILE` of the container engine, `ulimit -Hn`",
        files,
    ),
    Check(
        "processes",
        "the limits of processes and threads: the cgroup's, the user's",
        "raise `pids` in compose, kubelet's `podPidsLimit`, or `ulimit -u`",
        processes,
    ),
    Check(
        "cores",
        "the cores that may be used, by affinity and the cgroup's quota, THREADS, and how often the quota stopped them",
        "raise the CPU limit, or lower THREADS",
        cores,
    ),
    Check(
        "memory",
        "the cgroup's limit, what is left of it, what the machine has, and processes that the kernel killed",
        "raise the memory limit, or lower what the job needs",
        memory,
    ),
)
