"""The check of GPUs: driver, device and torch's build fit together. Neither torch nor CUDA is loaded for it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from rolecall import config
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason

# the driver from which each version of CUDA runs: https://docs.nvidia.com/deploy/cuda-compatibility/
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
SMI = "nvidia-smi"
QUERY = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
INSTALL = "install the image or the wheels for CUDA (TORCH=cuda), or set DEVICE=cpu"


def cuda_of_torch(package: Path | None = None) -> str:
    """The version of CUDA that the installed torch is built for; empty for a build without, or without torch."""
    if package is None:
        spec = importlib.util.find_spec("torch")
        package = Path(spec.origin).parent if spec and spec.origin else Path()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse((package / "version.py").read_text()).body:
            names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(isinstance(name, ast.Name) and name.id == "cuda" for name in names):
                return str(ast.literal_eval(node.value) or "")  # type: ignore[attr-defined]
    return ""


def driver(patient: Patient) -> str:
    """The version of the loaded driver; empty where there is none."""
    with contextlib.suppress(OSError):
        text = (patient.proc / "driver" / "nvidia" / "version").read_text()
        if match := re.search(r"Module\D*?(?:x86_64|aarch64)?\s+(\d+\.\d+[.\d]*)", text):
            return match[1]
    return ""


def ask_smi(patient: Patient) -> tuple[list[str], str]:
    """A line a GPU from nvidia-smi (name, driver, memory), and what is wrong with it."""
    program = shutil.which(SMI)
    if not program:
        return [], f"{SMI} is absent"
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=patient.timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{SMI}: {reason(error)}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        return [], f"{SMI}: {(lines or done.stderr.strip().splitlines() or ['it failed'])[0]}"
    return lines, ""


def gpus(patient: Patient) -> Finding:
    """Whether this rank computes where DEVICE says."""
    device, built = patient.settings.device, cuda_of_torch()
    torch = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
    if device == "cpu":
        return ok(f"DEVICE=cpu; {torch}")
    listed, fault = ask_smi(patient)
    version = driver(patient) or (listed[0].split(",")[1].strip() if listed and "," in listed[0] else "")
    visible = config.visible_gpus()
    hidden = visible is not None and visible.strip() in ("", "-1")
    if not version:
        text = f"no NVIDIA driver is seen here ({fault or 'no file of it'}); {torch}"
        if device == "cuda":
            return problem(f"DEVICE=cuda, but {text}", "give the container a GPU (`--gpus`, nvidia.com/gpu), or set "
                           "DEVICE=cpu")  # fmt: skip
        return warning(f"{text}: this rank computes on the CPU") if built else ok(f"{text}: it computes on the CPU")
    there = f"{len(listed)} x {listed[0].split(',')[0]}, " if listed else ""
    text = f"{there}driver {version}; {torch}"
    if fault and fault != f"{SMI} is absent":
        return problem(f"{text}; {fault}", "restart the machine, or load the driver that its libraries are of")
    if not built:
        return problem(f"DEVICE=cuda, but {text}", INSTALL) if device == "cuda" else warning(
            f"{text}: this rank computes on the CPU", INSTALL)  # fmt: skip
    oldest = OLDEST_DRIVERS.get(int(built.partition(".")[0]), 0)
    if int(version.partition(".")[0]) < oldest:
        return problem(f"{text}, which needs driver {oldest} or newer", "update the driver, or install torch for an "
                       "earlier CUDA")  # fmt: skip
    if hidden:
        text = f"{text}; CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        return problem(text, "remove CUDA_VISIBLE_DEVICES, or set DEVICE=cpu") if device == "cuda" else ok(text)
    return ok(text + (f"; {fault}" if fault else ""))


CHECKS = (
    Check(
        "GPU",
        "DEVICE, the NVIDIA driver, nvidia-smi, CUDA_VISIBLE_DEVICES, and the CUDA that torch is built for",
        "give the container a GPU, update the driver, or install the build of torch that fits",
        gpus,
    ),
)
