"""Checks of what ranks prove membership with: the token, certificates, the handshake."""

from __future__ import annotations

import ssl

from cryptography import x509

from rolecall.errors import UsageError
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason
from rolecall.tunnel import keys
from rolecall.tunnel.dial import StrangerError
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.peek import Presented

SOON = 3600.0  # seconds before its end from which a certificate should have been renewed
NO_JOB = "JOB is not known"
AUTHORITY = "rolecall "  # how the name of an authority that is derived from a token begins


def token(patient: Patient) -> Finding:
    """Whether both sides have the same token, also where that keeps them from talking."""
    s = patient.settings
    if s.tls_cert:
        return unchecked("TLS_CERT takes the token's place")
    if not patient.job_name:
        return unchecked(NO_JOB)
    if not s.token:
        return problem(keys.MISSING, "") if s.secure else warning(
            "TLS=off, and no JOB_TOKEN: whoever reaches a port of this rank can run code on it",
            "use it only on a network that nobody else is in (docs/security.md)")  # fmt: skip
    here = keys.fingerprint(s, patient.job_name)
    try:
        there = _fingerprint_of_rank0(patient)
    except PermissionError:
        return problem(f"rank 0 does not take this token (fingerprint {here})")
    if there is None:
        return unchecked(f"fingerprint {here} here; rank 0 is not reached, or does not tell its own")
    if there != here:
        return problem(f"fingerprint {here} here, {there} at rank 0: two tokens, or two jobs")
    return ok(f"fingerprint {here} on both sides")


def _fingerprint_of_rank0(patient: Patient) -> str | None:
    """By its certificate, which is presented to everybody; with TLS=off by its own word."""
    try:
        if patient.settings.secure:
            return patient.rank0.presented.get().fingerprint or None
        return str(patient.rank0.facts.get()["fingerprint"]) or None
    except PermissionError:
        raise
    except (OSError, LookupError, ValueError, UsageError, StrangerError):
        return None


def certificate(patient: Patient) -> Finding:
    """A certificate of the user's own: is it valid, of the authority, and of use at both ends?"""
    s = patient.settings
    if not s.tls_cert:
        return unchecked("this rank makes itself a certificate from JOB_TOKEN")
    try:
        credentials = Credentials(s, patient.job_name)
        one = x509.load_pem_x509_certificates(s.tls_cert.read_bytes())[0]
    except (OSError, ValueError, UsageError) as error:
        return problem(str(error))
    now, ends = patient.clock(), one.not_valid_after_utc.timestamp()
    if now > ends:
        return problem(f"TLS_CERT={s.tls_cert} expired {_ago(now - ends)} ago")
    if now < one.not_valid_before_utc.timestamp():
        return problem(f"TLS_CERT={s.tls_cert} is not valid yet", "set this machine's clock")
    try:
        _meet(credentials, s.master_addr if patient.first else None)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or reason(error)
        return problem(f"TLS_CERT={s.tls_cert} is not accepted by another rank with the same files: {why}")
    if ends - now < SOON:
        return warning(f"TLS_CERT={s.tls_cert} expires in {_ago(ends - now)}", "look at what is to renew it")
    return ok(f"TLS_CERT={s.tls_cert} is of TLS_CA, for both ends, and valid for {_ago(ends - now)}")


def _meet(credentials: Credentials, host: str | None) -> None:
    """A handshake of this rank with itself, in memory; its certificate must be for `host`. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = credentials.client if host else credentials.anybody
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = credentials.server.wrap_bio(to_server, to_client, server_side=True)
    ends = [client, server]
    for _ in range(20):  # messages of a handshake: far fewer
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    if ends:
        raise ssl.SSLError("the handshake does not end")


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def handshake(patient: Patient) -> Finding:
    """The steps of a connection to rank 0's coordinator, and which of them fails."""
    s = patient.settings
    if not s.secure:
        return _unsecured(patient)
    if not patient.job_name:
        return unchecked(NO_JOB)
    if patient.first and not patient.runs:
        return unchecked("this is rank 0, which does not run here now")
    try:
        patient.rank0.address.get()
    except (OSError, UnicodeError):
        return unchecked("rank 0's port is not reached")
    try:
        presented = patient.rank0.presented.get()
    except OSError as error:
        return problem(f"first step, hello: {reason(error)}",
                       f"port {patient.rank0.port} is another program's, or rank 0 has TLS=off: correct MASTER_ADDR "
                       "and MASTER_PORT, or end that program")  # fmt: skip
    if fault := _fault(patient, presented):
        return fault
    try:
        patient.rank0.line.get()
    except UsageError as error:
        return problem(f"this rank has nothing to show: {error}", "see the token's line")
    except LookupError as error:
        return unchecked(str(error))
    except StrangerError as error:
        return problem(f"third step, this rank's certificate: {error}")
    except OSError as error:
        return problem(f"last step, rank 0's coordinator: {reason(error)}",
                       "wait until rank 0 has started; otherwise MASTER_ADDR leads to another rank")  # fmt: skip
    left = presented.ends - patient.clock()
    return ok(f"TLS 1.3, both certificates are accepted; rank 0's is valid for {_ago(left)}")


def _unsecured(patient: Patient) -> Finding:
    """Whether a coordinator without TLS answers."""
    try:
        patient.rank0.address.get()
        patient.rank0.facts.get()
    except (PermissionError, LookupError):
        pass  # it answers
    except (OSError, UnicodeError) as error:
        if patient.rank0.address.known:
            return problem(f"TLS=off, and what answers is no coordinator without TLS ({reason(error)})",
                           "give all ranks the same TLS; or the port is another program's")  # fmt: skip
    return warning("TLS=off: nothing is encrypted, and whoever reaches a port can run code",
                   "use it only on a network that nobody else is in (docs/security.md)")  # fmt: skip


def _fault(patient: Patient, presented: Presented) -> Finding | None:
    """What is wrong with rank 0's certificate."""
    s, now, second = patient.settings, patient.clock(), "second step, rank 0's certificate:"
    if not s.tls_cert:
        if not presented.issuer.startswith(AUTHORITY):
            return problem(f"{second} it is of {presented.issuer or 'nobody'}, not of a token",
                           "give both ranks the same JOB_TOKEN_FILE, or both TLS_CERT, TLS_KEY and TLS_CA; or the port "
                           "is another program's")  # fmt: skip
        job = presented.issuer.removeprefix(AUTHORITY)
        if job != patient.job_name[: 64 - len(AUTHORITY)]:
            return problem(f"{second} it is of job {job}, this rank of {patient.job_name}",
                           "correct MASTER_ADDR, or JOB")  # fmt: skip
        if s.token and presented.fingerprint not in ("", keys.fingerprint(s, patient.job_name)):
            return problem(f"{second} it was made from another token", "give all ranks one token, and restart them")
    if not presented.begins <= now <= presented.ends:
        when = f"expired {_ago(now - presented.ends)} ago" if now > presented.ends else (
            f"is not valid for another {_ago(presented.begins - now)}")  # fmt: skip
        return problem(f"{second} it {when}, by this machine's clock",
                       "set both machines' clocks" + ("; renew rank 0's TLS_CERT" if s.tls_cert else ""))  # fmt: skip
    rank0 = (keys.host_of(patient.job_name, patient.rank0_name),) if patient.rank0_name else ()
    if not s.tls_cert and rank0 and presented.hosts != rank0:
        return problem(f"{second} it is that of another rank of this job",
                       "MASTER_ADDR (and MASTER_PORT) must lead to rank 0")  # fmt: skip
    return None


CHECKS = (
    Check(
        "token",
        "the fingerprint of JOB_TOKEN here and at rank 0, whose certificate tells it to everybody",
        "give all ranks of the job one token (JOB_TOKEN_FILE), give each job its own, and restart the ranks",
        token,
    ),
    Check(
        "certificate",
        "with TLS_CERT: its validity, its authority, both of its usages, and at rank 0 its name",
        "renew it, or correct the files: docs/security.md lists what they need",
        certificate,
    ),
    Check(
        "TLS handshake",
        "which step fails: hello, rank 0's certificate (authority, job, validity, name), this rank's, the coordinator",
        "see the line: another program at the port, another token or job, a wrong clock, or a rank 0 that just starts",
        handshake,
    ),
)
