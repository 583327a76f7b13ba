"""Checks of the network: rank 0's name, rank 0's port, this rank's own ports."""

from __future__ import annotations

import errno
import socket
from collections import Counter

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


@check("ports", "end the program that holds it, or choose another PORT or METRICS_PORT")
def own_ports(subject: Subject) -> Finding:
    """PORT, for other ranks, and METRICS_PORT of this rank: free, or held by this rank."""
    s, free = subject.settings, list[str]()
    ports = [("METRICS_PORT", s.metrics_bind_addr or s.bind_addr, s.metrics_port)]
    if s.secure or subject.is_rank0:  # with TLS=off only rank 0 listens on PORT
        ports.insert(0, ("PORT", s.bind_addr, subject.port))
    for variable, host, number in ports:
        error, text = listen_error(host, number), f"{variable}={number}"
        if error is None:
            free.append(f"{text} is free")
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            text = f"{text}: {host} is not an address of this machine ({reason(error)})"
            return problem(text, "correct BIND_ADDR (METRICS_BIND_ADDR), or leave it empty")
        elif error.errno != errno.EADDRINUSE:
            return problem(f"{text}: this process cannot listen there ({reason(error)})")
        elif not subject.runs:
            return problem(f"{text} is held by another program or rank")
        else:
            free.append(f"{text} is held by this rank, which runs")
    return ok("; ".join(free))


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


CHECKS = (names, rank0_port, own_ports)
