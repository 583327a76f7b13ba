"""What a doctor says: a line a check, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolecall.config import __version__
from rolecall.observe.doctor.checks import Check, Finding, State
from rolecall.observe.doctor.patient import Patient

Findings = Sequence[tuple[Check, Finding]]
COLOURS: dict[State, str] = {"ok": "32", "warning": "33", "problem": "31", "not checked": "2"}


def head(patient: Patient) -> str:
    """Which rank was examined, and where."""
    place = f"{patient.target or 'no job'} on {patient.host}"
    if not patient.named:
        return (f"rolecall {__version__}: {place}, without a rank (ROLE, MASTER_ADDR, JOB_TOKEN_FILE); `rolecall run` "
                "gives its ranks all of these")  # fmt: skip
    return f"rolecall {__version__}: {patient.name}, {place}"


def line(check: Check, finding: Finding, width: int, colour: bool = False) -> str:
    """One check's line: its state, its name in `width` characters, what there is, what to do."""
    state = f"{finding.state:<11}"
    if colour:
        state = f"\033[{COLOURS[finding.state]}m{state}\033[0m"
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{state}  {check.name:<{width}}  {finding.text}{advice}"


def verdict(findings: Findings) -> str:
    """How many checks came out how."""
    counts = {state: sum(one.state == state for _, one in findings) for state in COLOURS}
    plural = {"problem": "problems", "warning": "warnings"}
    parts = [f"{count} {plural.get(state, state) if count > 1 else state}" for state, count in counts.items() if count]
    return f"{len(findings)} checks: {', '.join(parts)}"


def worst(findings: Findings) -> State:
    """The worst state; checks that were not made do not count."""
    states = {finding.state for _, finding in findings}
    order: tuple[State, ...] = ("problem", "warning", "ok")
    return next((state for state in order if state in states), "not checked")


def as_json(patient: Patient, findings: Findings) -> str:
    """All of it as JSON."""
    content: dict[str, Any] = {
        "version": __version__, "job": patient.job_name, "rank": patient.name, "host": patient.host,
        "time": patient.clock(), "state": worst(findings),
        "checks": [
            {"name": check.name, "state": finding.state, "text": finding.text, "advice": finding.advice}
            for check, finding in findings
        ],
    }  # fmt: skip
    return json.dumps(content, indent=1)
