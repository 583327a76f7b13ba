"""Checks of what this rank and rank 0 must agree on: the state of the gang, settings in common, clocks, versions."""

from __future__ import annotations

from typing import Any

from rolecall.errors import UsageError
from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.checks import Finding, check, ok, problem, unchecked, warning
from rolecall.observe.doctor.network import NOT_RUNNING
from rolecall.observe.doctor.subject import Subject
from rolecall.tunnel.dial import StrangerError
from rolecall.tunnel.keys import SKEW

CLOCK_REQUESTS = 4  # the one with the shortest round trip counts
MAX_TLS_SKEW_SECONDS, MAX_LOG_SKEW_SECONDS = SKEW.total_seconds(), 2.0
UNREACHED = OSError, LookupError, UsageError, StrangerError, UnicodeError
NOT_REACHED = "rank 0 is not reached"


@check("rank 0", "start the ranks that are missing; docs/runbook.md has the other causes")
def rank0(subject: Subject) -> Finding:
    """Whether rank 0's coordinator answers this rank as a member, and what the gang waits for."""
    if subject.is_rank0 and not subject.runs:
        return unchecked(NOT_RUNNING)
    try:
        gang = subject.rank0.answer.get().facts.get("gang") or {}
    except LookupError as error:
        return warning(str(error), "give all ranks the same version")
    except UNREACHED:
        return unchecked(NOT_REACHED)
    if gang.get("state") == "failed":
        return problem("the job has failed for good", "read the cause in rank 0's log, and see docs/runbook.md")
    if gang.get("state") == "gathering" and gang.get("missing"):
        missing = ", ".join(map(str, gang["missing"]))
        advice = "start them, or lower their count; the log of a rank that runs has the reason"
        return warning(f"a start waits for {missing}", advice)
    return ok(f"it answers; the gang is {gang.get('state')}")


@check("settings in common", "give every rank rank 0's values")
def settings(subject: Subject) -> Finding:
    """JOB and its file's version, INSTANCE, and every setting that must equal rank 0's."""
    try:
        theirs = subject.rank0.answer.get().facts
    except UNREACHED:
        return unchecked(NOT_REACHED)
    local = diagnosis.facts(subject.job, subject.settings)
    if theirs.get("job") != local["job"]:
        advice = "give every rank the same JOB and files, or correct MASTER_ADDR"
        return problem(f"this rank is of {local['job']}, rank 0 of {theirs.get('job')}", advice)
    here, there = local["settings"], theirs.get("settings", {})
    differences = [
        f"{name}={here.get(name)!r} here, {there.get(name)!r} at rank 0"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if differences:
        return problem("; ".join(differences))
    return ok(f"job, instance and {len(here)} settings equal rank 0's")


@check("clocks", "synchronize both clocks (NTP): above an hour no rank is accepted, above 2 s the times in logs differ")
def clocks(subject: Subject) -> Finding:
    """The difference to rank 0's clock, by the shortest of four round trips, with its error."""
    try:
        answers = [subject.rank0.answer.get(), *(subject.rank0.ask() for _ in range(CLOCK_REQUESTS - 1))]
    except UNREACHED:
        return unchecked(NOT_REACHED)
    best = min(answers, key=lambda answer: answer.error_s)
    direction = "ahead of" if best.offset_s > 0 else "behind"
    text = f"rank 0's clock is {_seconds(abs(best.offset_s))} {direction} this one (± {_seconds(best.error_s)})"
    if abs(best.offset_s) - best.error_s > MAX_TLS_SKEW_SECONDS:
        return problem(text)
    return warning(text) if abs(best.offset_s) - best.error_s > MAX_LOG_SKEW_SECONDS else ok(text)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


@check("versions", "give all ranks the same image, or the same constraints.txt")
def versions(subject: Subject) -> Finding:
    """Rolecall, torch and Python here and at rank 0."""
    local = diagnosis.versions()
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in local.items())
    if not local["torch"]:
        return problem(f"{text} here", "install torch in this environment")
    try:
        theirs: dict[str, Any] = subject.rank0.answer.get().facts["versions"]
    except UNREACHED:
        return unchecked(f"{text} here; {NOT_REACHED}")
    if local == theirs:
        return ok(f"{text} on both sides")
    other = ", ".join(f"{name} {theirs.get(name) or 'missing'}" for name in local)
    text = f"{text} here, {other} at rank 0"
    if local["rolecall"] != theirs.get("rolecall"):
        return problem(text)
    if any(_minor(local[name]) != _minor(theirs.get(name)) for name in ("torch", "python")):
        return warning(text)
    return ok(f"{text}, which are compatible")


def _minor(version: Any) -> list[str]:
    """The first two numbers of a version, which decide whether RPC is compatible."""
    return str(version).partition("+")[0].split(".")[:2]


CHECKS = (rank0, settings, clocks, versions)
