"""Checks of this rank's ports: free, or held by this rank itself, or by whom else."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from rolecall.errors import UsageError
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked
from rolecall.observe.doctor.patient import Patient, local
from rolecall.observe.doctor.steps import reason
from rolecall.tunnel import keys
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.peek import Presented, peek


def ranks(patient: Patient) -> Finding:
    """PORT, at which the tunnel listens."""
    s, number = patient.settings, patient.port
    if not s.secure and not patient.first:
        return unchecked("with TLS=off only rank 0 listens on PORT")
    problem_here = usable(s.bind_addr, number)
    if problem_here is None:
        return ok(f"PORT={number} is free")
    if problem_here.errno != errno.EADDRINUSE:
        return wrong("PORT", number, s.bind_addr, problem_here)
    if not s.secure:
        return ok(f"PORT={number} is held by this rank, which runs") if patient.runs else taken("PORT", number)
    try:
        presented = peek(_visitor(patient), (local(s.bind_addr), number), patient.timeout)
    except OSError:
        return taken("PORT", number)
    if patient.runs and (s.tls_cert or _is_this(patient, presented)):
        return ok(f"PORT={number} is held by this rank, which runs")
    if not s.tls_cert and presented.issuer == f"rolecall {patient.job_name}"[:64]:
        return problem(f"PORT={number} is held by another rank of this job{process(number)}")
    return taken("PORT", number)


def _visitor(patient: Patient) -> Credentials | None:
    with contextlib.suppress(UsageError):
        return Credentials(patient.settings, patient.job_name)
    return None


def _is_this(patient: Patient, presented: Presented) -> bool:
    """Whether a certificate is that of the rank which runs here: whose metrics say its place."""
    labels = patient.here.get() or {}
    name = f"{labels.get('role')}_{labels.get('ordinal')}"
    return presented.hosts in ((), (keys.host_of(patient.job_name, name),))  # none before it has its place


def metrics(patient: Patient) -> Finding:
    """METRICS_PORT."""
    s = patient.settings
    host, number = s.metrics_bind_addr or s.bind_addr, s.metrics_port
    problem_here = usable(host, number)
    if problem_here is None:
        return ok(f"METRICS_PORT={number} is free")
    if problem_here.errno != errno.EADDRINUSE:
        return wrong("METRICS_PORT", number, host, problem_here)
    try:
        labels = patient.here.get()
    except OSError:
        labels = None
    if labels is None:
        return taken("METRICS_PORT", number)
    rank = f"{labels.get('role')} {labels.get('ordinal')} of {labels.get('job')}"
    if patient.runs:
        return ok(f"METRICS_PORT={number} is held by this rank, which runs ({rank})")
    return problem(f"METRICS_PORT={number} is held by another rank, {rank}")


def usable(host: str, number: int) -> OSError | None:
    """Why a rank could not listen at `host`, every address where that is empty; None where it could."""
    try:
        if not host and socket.has_dualstack_ipv6():
            family, place = socket.AF_INET6, ("::", number)
        else:
            family, _, _, _, place = socket.getaddrinfo(host or "0.0.0.0", number, type=socket.SOCK_STREAM)[0]  # type: ignore[assignment]
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not host and family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(place)
            listener.listen(1)
    except OSError as error:
        return error
    return None


def wrong(variable: str, number: int, host: str, error: OSError) -> Finding:
    """The port cannot be had, though nobody has it."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return problem(f"{variable}={number}: {host} is no address of this machine ({reason(error)})",
                       "correct BIND_ADDR (METRICS_BIND_ADDR), or leave it empty")  # fmt: skip
    return problem(f"{variable}={number}: cannot be listened on ({reason(error)})")


def taken(variable: str, number: int) -> Finding:
    """Another program has the port."""
    return problem(f"{variable}={number} is held by another program{process(number)}")


def process(number: int) -> str:
    """Which process listens on a port, in brackets; nothing where that cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == number and one.pid:
                return f" ({psutil.Process(one.pid).name()}, process {one.pid})"
    return ""


CHECKS = (
    Check(
        "PORT",
        "this rank's port for other ranks: free, or held by this rank's own tunnel",
        "end the program that holds it, or choose another PORT",
        ranks,
    ),
    Check(
        "METRICS_PORT",
        "this rank's port for metrics: free, or held by this rank itself",
        "end the program that holds it, or choose another METRICS_PORT",
        metrics,
    ),
)
