"""Checks of what this rank is told: its settings, and which rank it is."""

from __future__ import annotations

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked, warning
from rolecall.observe.doctor.patient import Patient


def settings(patient: Patient) -> Finding:
    """Whether all settings can be used."""
    if patient.wrong:
        return problem("; ".join(patient.wrong), "correct them; `rolecall config JOB` lists every variable")
    count = len(Settings.model_fields) + len(patient.variables)
    return ok(f"all {count} can be used")


def spelling(patient: Patient) -> Finding:
    """Whether a variable looks misspelt."""
    pairs = config.misspelt({*Settings.model_fields, *patient.variables})
    if not pairs:
        return ok("no variable looks like a setting misspelt")
    text = ", ".join(f"{name} (for {meant}?)" for name, meant in pairs)
    return warning(f"without effect: {text}", "rename it, or remove it where it belongs to another program")


def place(patient: Patient) -> Finding:
    """Which rank this is."""
    if patient.job is None:
        return unchecked("JOB cannot be described")
    try:
        identity = patient.identity
    except UsageError as error:
        return problem(str(error), "correct ROLE and ORDINAL, or RANK")
    if identity is None or not identity.role:
        return ok("the gang gives this rank its role and ordinal")
    if identity.ordinal is None:
        return ok(f"{identity.role}; the gang gives it its ordinal")
    return ok(patient.name + (", which is rank 0" if patient.first else ""))


CHECKS = (
    Check(
        "settings",
        "every variable of the job's and Rolecall's own: type, bounds, files that they name",
        "correct the named variables; `rolecall config JOB` lists what each may be",
        settings,
    ),
    Check(
        "spelling",
        "variables whose name nearly is that of a setting",
        "rename or remove them: they have no effect",
        spelling,
    ),
    Check(
        "place",
        "the role and the ordinal, from ROLE, ORDINAL, RANK or the host name",
        "give ROLE and ORDINAL, or RANK, within the job's counts",
        place,
    ),
)
