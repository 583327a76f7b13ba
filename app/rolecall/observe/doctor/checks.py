"""What a check is, what comes of it, and how it is given up where it hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason, within

State = Literal["ok", "warning", "problem", "not checked"]
SLACK = 5.0  # seconds that a check may take beyond the waits that it bounds itself


@dataclass(frozen=True)
class Finding:
    """What came of a check: `text` says what there is, `advice` what to do about it."""

    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A check: its name, what it looks at and what to do where it finds a fault (both for the documentation)."""

    name: str
    subject: str
    action: str
    examine: Callable[[Patient], Finding]


def ok(text: str) -> Finding:
    """All is as it should be."""
    return Finding("ok", text)


def warning(text: str, advice: str = "") -> Finding:
    """A rank can work so, but not well."""
    return Finding("warning", text, advice)


def problem(text: str, advice: str = "") -> Finding:
    """A rank cannot work so."""
    return Finding("problem", text, advice)


def unchecked(text: str) -> Finding:
    """It could not be looked at, or does not matter here; `text` says why."""
    return Finding("not checked", text)


def examine(check: Check, patient: Patient) -> Finding:
    """What comes of `check`, whatever it raises, within the patient's deadline."""
    try:
        finding = within(patient.timeout + patient.wait + SLACK, check.examine, patient)
    except TimeoutError as error:
        return problem(str(error), check.action)
    except Exception as error:  # a fault of the check's own says nothing of the rank
        return unchecked(f"the check failed ({type(error).__name__}: {reason(error)})")
    if finding.state in ("warning", "problem") and not finding.advice:
        return Finding(finding.state, finding.text, check.action)
    return finding
