"""Checks of what this rank and rank 0 must agree on: credentials, the state of the gang, settings, clocks, versions."""

from __future__ import annotations

from typing import Any

from cryptography import x509

from rolecall import machine
from rolecall.errors import UsageError
from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, unchecked, warning
from rolecall.observe.doctor.network import NOT_RUNNING
from rolecall.observe.doctor.subject import Subject
from rolecall.tunnel import keys
from rolecall.tunnel.keys import SKEW, Credentials

TRUSTED_NETWORK = "use it only on a network that nobody else is in (docs/security.md)"
MAX_TLS_SKEW_SECONDS, MAX_LOG_SKEW_SECONDS = SKEW.total_seconds(), 2.0
UNREACHED = OSError, UsageError, UnicodeError
NOT_REACHED = "rank 0 is not reached"


@check(
    "credentials",
    "give all ranks of the job one token (JOB_TOKEN_FILE) and each job its own, or correct the certificate's files "
    "(docs/security.md)",
)
def credentials(subject: Subject) -> Finding:
    """The fingerprint of JOB_TOKEN here and at rank 0, whose certificate shows it to everybody; or, with TLS_CERT,
    whether the files can be read and belong together, and the validity."""
    s = subject.settings
    if s.tls_cert:
        return _certificate(subject)
    if not s.token and s.secure:
        return problem(keys.MISSING)
    if not s.token:
        return warning("TLS=off, and no JOB_TOKEN: any host that reaches a port can run code here", TRUSTED_NETWORK)
    here = keys.fingerprint(s, subject.job.name)
    try:
        theirs = subject.rank0.fingerprint.get() if s.secure else subject.rank0.answer.get().facts.get("fingerprint")
    except UsageError:
        return problem(f"rank 0 refuses this token (fingerprint {here})")
    except OSError:
        theirs = ""
    if not theirs:
        return unchecked(f"fingerprint {here} here; rank 0 is not reached, or does not show its own")
    if theirs != here:
        return problem(f"fingerprint {here} here, {theirs} at rank 0: two tokens, or two jobs")
    return ok(f"fingerprint {here} on both sides")


def _certificate(subject: Subject) -> Finding:
    s, now = subject.settings, subject.clock()
    assert s.tls_cert is not None
    try:
        Credentials(s, subject.job.name)
        here = x509.load_pem_x509_certificates(s.tls_cert.read_bytes())[0]
    except (OSError, ValueError, UsageError) as error:
        return problem(str(error))
    begins, ends = here.not_valid_before_utc, here.not_valid_after_utc
    text = f"TLS_CERT={s.tls_cert} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
    if not begins.timestamp() <= now <= ends.timestamp():
        return problem(text, "renew it, or set this machine's clock")
    return ok(text)


@check("rank 0", "start the ranks that are missing; docs/runbook.md has the other causes")
def rank0(subject: Subject) -> Finding:
    """Whether a TLS handshake succeeds, rank 0 and this rank accept each other, the coordinator answers, and what the
    gang waits for."""
    if subject.is_rank0 and not subject.runs:
        return unchecked(NOT_RUNNING)
    secure = subject.settings.secure
    try:
        subject.rank0.connected.get()
    except (OSError, UnicodeError):
        return unchecked("rank 0's port is not reached")
    try:
        if secure:
            subject.rank0.fingerprint.get()
    except OSError as error:
        advice = "correct MASTER_ADDR and MASTER_PORT, or end that program; or rank 0 has TLS=off"
        return problem(f"no TLS handshake: {reason(error)}", advice)
    try:
        gang = subject.rank0.answer.get().facts.get("gang") or {}
    except UsageError as error:
        return problem(str(error), "see the check of the credentials")
    except OSError as error:
        advice = "wait until rank 0 has started; otherwise MASTER_ADDR leads to another rank or program"
        text = "both certificates are accepted, but no coordinator answers" if secure else "TLS=off, and no coordinator"
        return problem(f"{text}: {reason(error)}", advice)
    return _state(gang, secure)


def _state(gang: dict[str, Any], secure: bool) -> Finding:
    if gang.get("state") == "failed":
        return problem("the job has failed for good", "read the cause in rank 0's log, and see docs/runbook.md")
    if gang.get("state") == "gathering" and gang.get("missing"):
        missing = ", ".join(map(str, gang["missing"]))
        advice = "start them, or lower their count; the log of a rank that runs has the reason"
        return warning(f"a start waits for {missing}", advice)
    if not secure:
        return warning("TLS=off: nothing is encrypted, and any host that reaches a port can run code", TRUSTED_NETWORK)
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
    """The difference to rank 0's clock, with its error."""
    try:
        answer = subject.rank0.answer.get()
    except UNREACHED:
        return unchecked(NOT_REACHED)
    direction = "ahead of" if answer.offset_s > 0 else "behind"
    text = f"rank 0's clock is {abs(answer.offset_s):.3f} s {direction} this one (± {answer.error_s:.3f} s)"
    if abs(answer.offset_s) - answer.error_s > MAX_TLS_SKEW_SECONDS:
        return problem(text)
    return warning(text) if abs(answer.offset_s) - answer.error_s > MAX_LOG_SKEW_SECONDS else ok(text)


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
    if any(machine.minor(local[name]) != machine.minor(str(theirs.get(name))) for name in ("torch", "python")):
        return warning(text)
    return ok(f"{text}, which are compatible")


CHECKS = (credentials, rank0, settings, clocks, versions)
