"""The check of a package that a job imports late: whether it can be imported, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from rolecall.observe.doctor.checks import Check, Finding, ok, unchecked, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason

JOB = "ps"  # whose MNIST needs it
MODULE = "torchvision.datasets"


def torchvision(patient: Patient) -> Finding:
    """Whether torchvision can be imported, which fails where it is of another torch."""
    if patient.target != JOB:
        return unchecked(f"only {JOB} uses it")
    command = [sys.executable, "-P", "-c", f"import {MODULE}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient.timeout, check=False)
    except subprocess.TimeoutExpired:
        return unchecked(f"its import takes over {patient.timeout:g} s (--timeout)")
    except OSError as error:
        return unchecked(f"no process can be started ({reason(error)})")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return warning(f"cannot be imported ({last}): DATASET=mnist is read from files, and not downloaded")
    return ok("can be imported")


CHECKS = (
    Check(
        "torchvision",
        f"of the job {JOB}: whether torchvision can be imported; each version fits one version and build of torch",
        "install torch and torchvision together, from one index (constraints.txt)",
        torchvision,
    ),
)
