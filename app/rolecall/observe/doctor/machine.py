"""Checks of the machine, or of the container's cgroup: packages, open files, processes, memory, GPU and driver."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import subprocess
from pathlib import Path

import psutil
from rich.filesize import decimal

from rolecall import config
from rolecall.declare import registry
from rolecall.errors import UsageError
from rolecall.observe.cgroup import Cgroup
from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, warning
from rolecall.observe.doctor.subject import Subject

MIN_FILES, FILES_PER_RANK = 256, 16  # open files of a rank, and more for each other rank
MIN_PROCESSES = 128  # threads: a tunnel has 35, a worker those of torch and RPC
MIN_MEMORY_BYTES = 512 * 2**20  # of a rank whose worker has imported torch


@check("packages", "install them in the environment of this rank")
def packages(subject: Subject) -> Finding:
    """Those that a built-in job needs beside the core."""
    try:
        registry.require_extra(subject.job.target)
    except UsageError as error:
        return problem(str(error))
    return ok("all are installed")


@check("open files", "raise it: `ulimits` in compose, `LimitNOFILE` of the container engine, `ulimit -Hn`")
def files(subject: Subject) -> Finding:
    """The hard limit of open files, against the number of ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MIN_FILES + FILES_PER_RANK * (subject.job.ranks)
    if hard == resource.RLIM_INFINITY:
        return ok("open files are not limited")
    text = f"{soft} open files, which a rank raises to {hard}" if soft < hard else f"{hard} open files"
    return problem(f"{text}; it needs about {needed}") if hard < needed else ok(text)


@check("processes", "raise `pids` in compose, kubelet's `podPidsLimit`, or `ulimit -u`")
def processes(subject: Subject) -> Finding:
    """The limits of processes and threads: the cgroup's, the user's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = Cgroup(subject.cgroup, subject.proc / "self" / "cgroup")
    limit, used = group.least("pids", "pids.max"), group.least("pids", "pids.current") or 0
    if os.geteuid() and soft != resource.RLIM_INFINITY and (limit is None or soft < limit):
        text, left = f"{soft} processes and threads for this user (ulimit)", soft
    elif limit is not None:
        text, left = f"{used} of {limit} processes and threads in this cgroup", limit - used
    else:
        return ok("processes and threads are not limited")
    if left < MIN_PROCESSES and not subject.runs:
        return problem(f"{text}; a rank needs about {MIN_PROCESSES}")
    return warning(text) if left < MIN_PROCESSES / 4 else ok(text)


@check("memory", "raise the memory limit, or lower what the job needs")
def memory(subject: Subject) -> Finding:
    """The cgroup's limit, what the machine has left, and processes that the kernel killed."""
    machine = psutil.virtual_memory()
    group = Cgroup(subject.cgroup, subject.proc / "self" / "cgroup")
    limit = group.least("memory", "memory.max", "memory.limit_in_bytes")
    text = f"{decimal(machine.available)} of the machine's {decimal(machine.total)} are free"
    text += f"; the limit is {decimal(limit)}" if limit is not None and limit < machine.total else ""
    if killed := group.oom_kills().group:
        return warning(f"{text}; the kernel has killed {killed} processes here because memory ran out")
    if (limit or machine.total) < MIN_MEMORY_BYTES or (machine.available < MIN_MEMORY_BYTES and not subject.runs):
        return warning(f"{text}; a rank that has imported torch takes about {decimal(MIN_MEMORY_BYTES)}")
    return ok(text)


# ---- the GPU; neither torch nor CUDA is loaded


@check("GPU", "give the container a GPU, update the driver, or install the build of torch that fits")
def gpu(subject: Subject) -> Finding:
    """DEVICE, the driver of nvidia-smi, CUDA_VISIBLE_DEVICES, and the CUDA version that torch is built for."""
    device, built, visible = subject.settings.device, cuda_of_torch(), config.visible_gpus()
    torch = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
    if device == "cpu":
        return ok(f"DEVICE=cpu; {torch}")
    # a fault of the GPU is a problem if the rank must use it; otherwise it computes on the CPU
    fault = problem if device == "cuda" else warning
    gpus, error = _query_smi(subject.timeout)
    if error and not built and device != "cuda":
        return ok(f"{error}; {torch}: it computes on the CPU")
    if error:
        return fault(f"DEVICE={device}, but {error}; {torch}", "give the container a GPU (--gpus), or set DEVICE=cpu")
    text = f"{len(gpus)} x {gpus[0]}; {torch}"
    if not built:
        return fault(text, "install the image or the wheels for CUDA (TORCH=cuda), or set DEVICE=cpu")
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"{text}; CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        return fault(text, "remove CUDA_VISIBLE_DEVICES, or set DEVICE=cpu")
    return ok(text)


def cuda_of_torch(package: Path | None = None) -> str:
    """The CUDA version that the installed torch is built for; empty for a build without CUDA, or without torch."""
    if package is None:
        spec = importlib.util.find_spec("torch")  # does not import it
        package = Path(spec.origin).parent if spec and spec.origin else Path()
    with contextlib.suppress(OSError):
        if match := re.search(r"^cuda\b.*= '([\d.]+)'", (package / "version.py").read_text(), re.MULTILINE):
            return match[1]
    return ""


def _query_smi(timeout: float) -> tuple[list[str], str]:
    """A line for each GPU from nvidia-smi: name, driver; or what is wrong."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi cannot be run ({reason(error)})"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        return [], f"nvidia-smi fails: {(lines or done.stderr.strip().splitlines() or ['it lists no GPU'])[0]}"
    return lines, ""


CHECKS = (packages, files, processes, memory, gpu)
