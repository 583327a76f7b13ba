"""Checks of what proves membership: the token, certificates, the TLS handshake with rank 0."""

from __future__ import annotations

from cryptography import x509

from rolecall.errors import UsageError
from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, unchecked, warning
from rolecall.observe.doctor.network import NOT_RUNNING
from rolecall.observe.doctor.subject import Subject
from rolecall.tunnel import keys
from rolecall.tunnel.dial import StrangerError
from rolecall.tunnel.keys import Credentials

TRUSTED_NETWORK = "use it only on a network that nobody else is in (docs/security.md)"


@check("token", "give all ranks of the job one token (JOB_TOKEN_FILE), give each job its own, and restart the ranks")
def token(subject: Subject) -> Finding:
    """The fingerprint of JOB_TOKEN here and at rank 0, whose certificate shows it to everybody."""
    s = subject.settings
    if s.tls_cert:
        return unchecked("TLS_CERT replaces the token")
    if not s.token and s.secure:
        return problem(keys.MISSING)
    if not s.token:
        return warning("TLS=off, and no JOB_TOKEN: any host that reaches a port can run code here", TRUSTED_NETWORK)
    here = keys.fingerprint(s, subject.job.name)
    try:
        if s.secure:
            theirs = subject.rank0.certificate.get().fingerprint
        else:
            theirs = str(subject.rank0.answer.get().facts["fingerprint"])
    except PermissionError:
        return problem(f"rank 0 refuses this token (fingerprint {here})")
    except (OSError, LookupError, ValueError, UsageError, StrangerError):
        theirs = ""
    if not theirs:
        return unchecked(f"fingerprint {here} here; rank 0 is not reached, or does not show its own")
    if theirs != here:
        return problem(f"fingerprint {here} here, {theirs} at rank 0: two tokens, or two jobs")
    return ok(f"fingerprint {here} on both sides")


@check("certificate", "renew it, or correct the files: docs/security.md lists what they need")
def certificate(subject: Subject) -> Finding:
    """With TLS_CERT: whether the files can be read and belong together, and the validity."""
    s, now = subject.settings, subject.clock()
    if not s.tls_cert:
        return unchecked("this rank makes its certificate from JOB_TOKEN")
    try:
        Credentials(s, subject.job.name)
        here = x509.load_pem_x509_certificates(s.tls_cert.read_bytes())[0]
    except (OSError, ValueError, UsageError) as error:
        return problem(str(error))
    begins, ends = here.not_valid_before_utc.timestamp(), here.not_valid_after_utc.timestamp()
    if now > ends:
        return problem(f"TLS_CERT={s.tls_cert} expired {_duration(now - ends)} ago")
    if now < begins:
        return problem(f"TLS_CERT={s.tls_cert} is not valid yet", "set this machine's clock")
    return ok(f"TLS_CERT={s.tls_cert} is valid for {_duration(ends - now)}")


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


@check(
    "TLS handshake",
    "see the line: another program at the port, another token or job, a wrong clock, or a rank 0 that is starting",
)
def handshake(subject: Subject) -> Finding:
    """Whether a TLS handshake succeeds, rank 0 and this rank accept each other, and the coordinator answers."""
    if subject.is_rank0 and not subject.runs:
        return unchecked(NOT_RUNNING)
    try:
        subject.rank0.connected.get()
    except (OSError, UnicodeError):
        return unchecked("rank 0's port is not reached")
    if not subject.settings.secure:
        return _unencrypted(subject)
    try:
        subject.rank0.certificate.get()
    except OSError as error:
        advice = "correct MASTER_ADDR and MASTER_PORT, or end that program; or rank 0 has TLS=off"
        return problem(f"no TLS handshake: {reason(error)}", advice)
    try:
        subject.rank0.answer.get()
    except UsageError as error:
        return problem(f"this rank has no credentials: {error}", "see the check of the token")
    except LookupError as error:
        return unchecked(str(error))
    except StrangerError as error:
        return problem(f"rank 0 and this rank do not accept each other: {error}")
    except OSError as error:
        advice = "wait until rank 0 has started; otherwise MASTER_ADDR leads to another rank"
        return problem(f"both certificates are accepted, but no coordinator answers: {reason(error)}", advice)
    return ok("TLS 1.3; both certificates are accepted")


def _unencrypted(subject: Subject) -> Finding:
    try:
        subject.rank0.answer.get()
    except (PermissionError, LookupError):
        pass  # a coordinator answers
    except OSError as error:
        text = f"TLS=off, and what answers is not a coordinator without TLS ({reason(error)})"
        return problem(text, "give all ranks the same TLS, or end the program at that port")
    return warning("TLS=off: nothing is encrypted, and any host that reaches a port can run code", TRUSTED_NETWORK)


CHECKS = (token, certificate, handshake)
