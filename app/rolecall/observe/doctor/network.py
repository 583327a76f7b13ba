"""Checks of the way to rank 0: its name, the route, its port, large messages."""

from __future__ import annotations

import errno
import socket
from collections import Counter

import psutil

from rolecall.observe.doctor import diagnosis
from rolecall.observe.doctor.checks import Check, Finding, ok, problem, unchecked, warning
from rolecall.observe.doctor.patient import Patient
from rolecall.observe.doctor.steps import reason

PAUSE = 1.0  # seconds between two look-ups of a name
SMALLEST_MTU = 1280  # bytes: what IPv6 demands of every link
# linux/in.h, linux/in6.h
IP_MTU, IPV6_MTU = 14, 24
START = "start rank 0; otherwise MASTER_PORT (rank 0's PORT) is another"


def names(patient: Patient) -> Finding:
    """What MASTER_ADDR resolves to, twice."""
    host = patient.settings.master_addr
    try:
        before = patient.addresses.get()
        if is_address(host):
            return ok(f"MASTER_ADDR={host} is an address")
        patient.pause(PAUSE)
        after = patient.resolve()
    except (OSError, UnicodeError) as error:
        text = f"MASTER_ADDR={host} does not resolve ({reason(error)})"
        return warning(f"{text}, for the other ranks' sake") if patient.first else problem(text)
    text = ", ".join(address for _, address in after)
    if set(before) != set(after):
        earlier = ", ".join(address for _, address in before)
        return warning(f"MASTER_ADDR={host} is {text} now, and was {earlier} a second ago",
                       "use a name that stays at one rank: of a Service or an alias for rank 0 alone")  # fmt: skip
    if max(Counter(family for family, _ in after).values()) > 1:
        return warning(f"MASTER_ADDR={host} has several addresses ({text}), of which only rank 0's is right",
                       "use a name that stays at one rank: of a Service or an alias for rank 0 alone")  # fmt: skip
    return ok(f"MASTER_ADDR={host} is {text}")


def is_address(host: str) -> bool:
    """Whether `host` needs no look-up."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def route(patient: Patient) -> Finding:
    """From which address, and by which interface, packets to rank 0 leave."""
    try:
        family, address = patient.addresses.get()[0]
    except (OSError, UnicodeError):
        return unchecked("MASTER_ADDR does not resolve")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect((address, patient.rank0.port))
            here = str(probe.getsockname()[0])
    except OSError as error:
        return problem(f"no route leads to {address} ({reason(error)})")
    interface = interface_of(here)
    stats = psutil.net_if_stats().get(interface)
    if stats is not None and not stats.isup:
        return problem(f"{address} is reached from {here} by {interface}, which is down")
    by = f" by {interface}" + (f" (MTU {stats.mtu})" if stats else "") if interface else ""
    note = "; MASTER_ADDR is this machine" if here == address and not patient.first else ""
    return ok(f"{address} is reached from {here}{by}{note}")


def interface_of(address: str) -> str:
    """The interface that has `address`; empty where none is seen to."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return ""


def port(patient: Patient) -> Finding:
    """Whether rank 0's port takes a connection."""
    where = f"{patient.settings.master_addr}:{patient.rank0.port}"
    if patient.first and not patient.runs:
        return unchecked("this is rank 0, which does not run here now")
    try:
        patient.rank0.hosts()
    except (OSError, UnicodeError):
        return unchecked("MASTER_ADDR does not resolve")
    try:
        host, number = patient.rank0.address.get()
    except TimeoutError:
        return problem(f"{where} does not answer: packets are dropped on the way",
                       f"let TCP port {patient.rank0.port} through between the ranks: firewall, security group, "
                       "NetworkPolicy")  # fmt: skip
    except OSError as error:
        refused = error.errno == errno.ECONNREFUSED
        return problem(f"{where}: " + ("nothing listens there" if refused else reason(error)), START if refused else "")
    return ok(f"{host} takes connections at port {number}")


def messages(patient: Patient) -> Finding:
    """Whether a large message passes to rank 0 and back, and how large its packets are."""
    size = diagnosis.LARGE
    try:
        line = patient.rank0.line.get()
        patient.rank0.facts.get()  # a small one
    except Exception:  # of whatever kind: other checks say so
        return unchecked("rank 0 answers no small message")
    try:
        status, back = line.request("POST", diagnosis.PATH, bytes(size))
    except OSError as error:
        largest = path_mtu(line.sock) or "an unknown number of"
        return problem(
            f"small messages pass, one of {size} bytes does not ({reason(error)}); packets have {largest} bytes at most"
        )
    if status != 200 or len(back) != size:
        return problem(f"a message of {size} bytes came back with {len(back)} (status {status})")
    mtu, text = path_mtu(line.sock), f"{size} bytes pass both ways"
    if mtu and mtu < SMALLEST_MTU:
        return warning(
            f"{text}, in packets of at most {mtu} bytes", "find the hop with so small an MTU: all is slow so"
        )
    return ok(text + (f"; packets have at most {mtu} bytes" if mtu else ""))


def path_mtu(sock: socket.socket) -> int:
    """The greatest packet (bytes) that the kernel sends on a connection; 0 where it does not say."""
    level, option = {
        socket.AF_INET: (socket.IPPROTO_IP, IP_MTU),
        socket.AF_INET6: (socket.IPPROTO_IPV6, IPV6_MTU),
    }.get(sock.family, (0, 0))
    try:
        return sock.getsockopt(level, option)
    except OSError:  # it has ended
        return 0


CHECKS = (
    Check(
        "name resolution",
        "what MASTER_ADDR resolves to, all addresses, in two look-ups a second apart",
        "correct MASTER_ADDR, or create what bears that name (rank 0's container, its Service); in a pod, look whether "
        "the network policy lets DNS through",
        names,
    ),
    Check(
        "route",
        "the interface and the address from which packets to rank 0 leave",
        "bring the interface up, or give the machine a route to rank 0's network",
        route,
    ),
    Check(
        "rank 0's port",
        "whether rank 0's PORT takes a TCP connection",
        "start rank 0; let the port through firewalls and network policies; correct MASTER_PORT",
        port,
    ),
    Check(
        "large messages",
        "a message of 60,000 bytes to rank 0 and back, and the path's MTU afterwards",
        "lower the MTU of this machine's interface (or of the overlay network) to what the path carries, or let ICMP's "
        "`fragmentation needed` through",
        messages,
    ),
)
