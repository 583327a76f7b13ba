"""Checks of what this rank and rank 0 say of themselves: the gang, settings in common, clocks, versions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rolecall.errors import UsageError
from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.tunnel.dial import StrangerError
from rolecall.tunnel.keys import SKEW

ROUNDS = 8  # round trips, of which the shortest says most
FAR, OFF = SKEW.total_seconds(), 2.0  # seconds between two clocks: no handshake succeeds; logs do not fit together
UNREACHED = OSError, LookupError, UsageError, StrangerError, UnicodeError
NOT_REACHED = "rank 0 is not reached"


def rank0(patient: Patient) -> Finding:
    """Whether rank 0 answers a member, and what the gang does."""
    if patient.first and not patient.runs:
        return unchecked("this is rank 0, which does not run here now")
    try:
        answer = patient.rank0.facts.get()
    except LookupError as error:
        return warning(str(error), "give all ranks the same version")
    except UNREACHED:
        return unchecked(NOT_REACHED)
    gang = answer.get("gang") or {}
    if gang.get("state") == "failed":
        return problem("the job has failed for good", "read its cause in rank 0's log, and see docs/runbook.md")
    if gang.get("state") == "gathering" and gang.get("missing"):
        missing = ", ".join(map(str, gang["missing"]))
        return warning(
            f"a start waits for {missing}", "start them, or lower their count; the log of one that runs says why"
        )
    return ok(f"it answers; the gang is {gang.get('state')}")


def common(patient: Patient) -> Finding:
    """Job, instance, and the settings that must be equal."""
    if patient.job is None:
        return unchecked("JOB cannot be described")
    if patient.wrong:
        return unchecked("this rank's settings are wrong")
    try:
        there = patient.rank0.facts.get()
    except UNREACHED:
        return unchecked(NOT_REACHED)
    here = diagnosis.facts(patient.job, patient.settings)
    if there.get("job") != here["job"]:
        return problem(f"this rank is of {here['job']}, rank 0 of {there.get('job')}",
                       "give every rank the same JOB and files, or correct MASTER_ADDR")  # fmt: skip
    if differences := [
        f"{name}={here['settings'].get(name)!r} here, {there.get('settings', {}).get(name)!r} at rank 0"
        for name in sorted({*here["settings"], *there.get("settings", {})})
        if here["settings"].get(name) != there.get("settings", {}).get(name)
    ]:
        return problem("; ".join(differences))
    return ok(f"job, instance and {len(here['settings'])} settings are those of rank 0")


@dataclass(frozen=True)
class Offset:
    """How far rank 0's clock is ahead of this machine's, and by how much that may be wrong, in seconds."""

    seconds: float
    error: float


def measure(patient: Patient) -> Offset:
    """The offset by the shortest of some round trips. Raises what `Rank0.ask` raises."""
    offsets = []
    for _ in range(ROUNDS):
        before, begun = patient.clock(), time.monotonic()
        there = patient.rank0.ask()["unix_s"]
        half = (time.monotonic() - begun) / 2
        offsets.append(Offset(there - before - half, half))
    return min(offsets, key=lambda offset: offset.error)


def clocks(patient: Patient) -> Finding:
    """How far this machine's clock is from rank 0's."""
    try:
        patient.rank0.facts.get()
        offset = measure(patient)
    except UNREACHED:
        return unchecked(NOT_REACHED)
    way = "ahead of" if offset.seconds > 0 else "behind"
    text = f"rank 0's clock is {_seconds(abs(offset.seconds))} {way} this one (± {_seconds(offset.error)})"
    if abs(offset.seconds) - offset.error > FAR:
        return problem(text)
    if abs(offset.seconds) - offset.error > OFF:
        return warning(text)
    return ok(text)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def versions(patient: Patient) -> Finding:
    """Rolecall, torch and Python on both sides."""
    here = diagnosis.versions()
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in here.items())
    if not here["torch"]:
        return problem(f"{text} here", "install torch in this environment")
    try:
        there: dict[str, Any] = patient.rank0.facts.get()["versions"]
    except UNREACHED:
        return unchecked(f"{text} here; {NOT_REACHED}")
    other = ", ".join(f"{name} {there.get(name) or 'missing'}" for name in here)
    if here == there:
        return ok(f"{text} on both sides")
    if here["rolecall"] != there.get("rolecall"):
        return problem(f"{text} here, {other} at rank 0")
    if _series(here["torch"]) != _series(there.get("torch")) or _series(here["python"]) != _series(there.get("python")):
        return warning(f"{text} here, {other} at rank 0")
    return ok(f"{text} here, {other} at rank 0, which fit together")


def _series(version: Any) -> list[str]:
    """The first two numbers of a version: in RPC, a third one makes no difference."""
    return str(version).partition("+")[0].split(".")[:2]


CHECKS = (
    Check(
        "rank 0",
        "whether rank 0's coordinator answers this rank as a member, and what the gang waits for",
        "start the ranks that are missing; docs/runbook.md has the other causes",
        rank0,
    ),
    Check(
        "settings in common",
        "JOB and its file's version, INSTANCE, and every setting that must be rank 0's",
        "give every rank rank 0's values",
        common,
    ),
    Check(
        "clocks",
        "the difference to rank 0's clock, by the shortest of eight round trips, with its error",
        "set both clocks (NTP): above an hour no rank is let in, above 2 s logs do not fit together",
        clocks,
    ),
    Check(
        "versions",
        "Rolecall, torch and Python here and at rank 0",
        "give all ranks the same image, or the same constraints.txt",
        versions,
    ),
)
