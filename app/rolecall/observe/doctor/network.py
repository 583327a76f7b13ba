"""Checks of the network: rank 0's name, the route, rank 0's port, this rank's own ports."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import Counter

import psutil

from rolecall.observe.doctor.checks import Finding, check, ok, problem, reason, unchecked, warning
from rolecall.observe.doctor.subject import Subject

NOT_RUNNING = "this is rank 0, and it does not run here now"


@check(
    "name resolution",
    "correct MASTER_ADDR, or create what has that name (rank 0's container, its Service); in a pod, check that the "
    "network policy allows DNS",
)
def names(subject: Subject) -> Finding:
    """All addresses of MASTER_ADDR."""
    host = subject.settings.master_addr
    try:
        addresses = subject.addresses.get()
    except (OSError, UnicodeError) as error:
        text = f"MASTER_ADDR={host} does not resolve ({reason(error)})"
        return warning(f"{text}, which other ranks need") if subject.is_rank0 else problem(text)
    text = ", ".join(address for _, address in addresses)
    if max(Counter(family for family, _ in addresses).values()) > 1:
        advice = "use a name that stays at one rank: of a Service or an alias for rank 0 alone"
        return warning(f"MASTER_ADDR={host} has several addresses ({text}), of which one is rank 0's", advice)
    return ok(f"MASTER_ADDR={host} is {text}" if text != host else f"MASTER_ADDR={host} is an address")


@check("route", "bring the interface up, or give the machine a route to rank 0's network")
def route(subject: Subject) -> Finding:
    """The address from which packets to rank 0 leave."""
    try:
        family, address = subject.addresses.get()[0]
    except (OSError, UnicodeError):
        return unchecked("MASTER_ADDR does not resolve")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # to connect a datagram socket sends nothing
            probe.connect((address, subject.settings.rank0_port))
            source = str(probe.getsockname()[0])
    except OSError as error:
        return problem(f"no route leads to {address} ({reason(error)})")
    if source == address and not subject.is_rank0:
        return ok(f"{address}, MASTER_ADDR, is this machine")
    return ok(f"{address} is reached from {source}")


@check("rank 0's port", "start rank 0; let the port through firewalls and network policies; correct MASTER_PORT")
def rank0_port(subject: Subject) -> Finding:
    """Whether rank 0's PORT accepts a TCP connection."""
    where = "{}:{}".format(*subject.rank0.address)
    if subject.is_rank0 and not subject.runs:
        return unchecked(NOT_RUNNING)
    try:
        subject.addresses.get()
    except (OSError, UnicodeError):
        return unchecked("MASTER_ADDR does not resolve")
    try:
        subject.rank0.connected.get()
    except TimeoutError:
        advice = "let the TCP port through between the ranks: firewall, security group, NetworkPolicy"
        return problem(f"{where} does not answer: packets are dropped on the way", advice)
    except OSError as error:
        if error.errno != errno.ECONNREFUSED:
            return problem(f"{where}: {reason(error)}")
        return problem(f"{where}: nothing listens there", "start rank 0, or correct MASTER_PORT (rank 0's PORT)")
    return ok(f"{where} accepts connections")


# ---- this rank's own ports


@check("PORT", "end the program that holds it, or choose another PORT")
def own_port(subject: Subject) -> Finding:
    """This rank's port for other ranks: free, or held by this rank."""
    s = subject.settings
    if not s.secure and not subject.is_rank0:
        return unchecked("with TLS=off only rank 0 listens on PORT")
    return _listening(subject, "PORT", s.bind_addr, subject.port)


@check("METRICS_PORT", "end the program that holds it, or choose another METRICS_PORT")
def metrics_port(subject: Subject) -> Finding:
    """This rank's port for metrics: free, or held by this rank."""
    s = subject.settings
    return _listening(subject, "METRICS_PORT", s.metrics_bind_addr or s.bind_addr, s.metrics_port)


def _listening(subject: Subject, variable: str, host: str, number: int) -> Finding:
    error = listen_error(host, number)
    if error is None:
        return ok(f"{variable}={number} is free")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        text = f"{variable}={number}: {host} is not an address of this machine ({reason(error)})"
        return problem(text, "correct BIND_ADDR (METRICS_BIND_ADDR), or leave it empty")
    if error.errno != errno.EADDRINUSE:
        return problem(f"{variable}={number}: this process cannot listen there ({reason(error)})")
    if subject.runs:
        return ok(f"{variable}={number} is held by this rank, which runs")
    return problem(f"{variable}={number} is held by another program or rank{_process(number)}")


def listen_error(host: str, number: int) -> OSError | None:
    """Why a rank cannot listen at `host`, or at every address if it is empty; None if it can."""
    try:
        if not host and socket.has_dualstack_ipv6():
            socket.create_server(("::", number), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            place = socket.getaddrinfo(host or "0.0.0.0", number, type=socket.SOCK_STREAM)[0]
            socket.create_server(place[4][:2], family=place[0]).close()
    except OSError as error:
        return error
    return None


def _process(number: int) -> str:
    """The process that listens on a port, in brackets; empty if it is not visible."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == number and one.pid:
                return f" ({psutil.Process(one.pid).name()}, process {one.pid})"
    return ""


CHECKS = (names, route, rank0_port, own_port, metrics_port)
