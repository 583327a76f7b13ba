"""From this rank's tunnel to a peer's: connects, checks who it is, and says what is wanted there. In a thread."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from rolecall.tunnel.channel import Channel, reason_of
from rolecall.tunnel.keys import Credentials

FIRST_PAUSE = 0.05  # seconds
CONNECTED, REFUSED = "+", "-"  # how a tunnel's answer to a wish begins


class StrangerError(Exception):
    """Whoever answers is not the member that was meant, or does not take this rank for one."""


def lasting(sock: socket.socket, lease: float) -> None:
    """Has the kernel give `sock` up where the other machine does not answer for twice the lease (seconds)."""
    seconds = min(max(1, round(lease / 2)), 2**15 - 1)  # Linux takes no more
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2000 * lease))


class CrowdedError(ConnectionError):
    """The other end has hung up before it answered: strangers crowd its door."""


def dial(
    credentials: Credentials, lease: float, name: str, address: str, port: int, wish: str, first: bool, seconds: float
) -> Channel:
    """A connection to what the member `name` announced as `wish`, at `address`; `first` says that this is rank 0.

    Raises StrangerError, and OSError where it is not reached within some seconds.
    """
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return _dial(credentials, lease, name, (address, port), wish, first, end)
        except CrowdedError:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)  # exponential backoff
        pause *= 2


def _dial(
    credentials: Credentials, lease: float, name: str, address: tuple[str, int], wish: str, first: bool, end: float
) -> Channel:
    with contextlib.ExitStack() as undo:
        sock = connect(address, end)
        undo.callback(sock.close)
        lasting(sock, lease)
        host = credentials.host(name, first)
        channel = Channel(sock, credentials.client if host else credentials.anybody, server=False, host=host)
        try:
            while not channel.handshake():
                channel.wait(end)
            channel.say(wish)
            while (answer := channel.hear()) is None:
                channel.wait(end)
        except ConnectionError as error:
            raise CrowdedError(f"hung up before an answer ({error})") from error
        except ssl.SSLZeroReturnError as error:
            raise CrowdedError("hung up before an answer") from error
        except ssl.SSLCertVerificationError as error:
            raise StrangerError(_explain(error, name, credentials.given)) from error
        except ssl.SSLError as error:
            text = reason_of(error)
            if "ALERT" in text:  # of the other end, which does not say why
                raise StrangerError(f"it does not take this rank for a member ({text.lower()})") from error
            raise ConnectionError(f"what answers speaks no TLS 1.3 ({text.lower()})") from error
        except ValueError as error:
            raise ConnectionError(f"what answers is no rank ({error})") from error
        if not answer.startswith(CONNECTED):
            raise ConnectionError(answer.removeprefix(REFUSED))
        undo.pop_all()
        return channel


def connect(address: tuple[str, int], end: float) -> socket.socket:
    """Connects to the first of the host's addresses that answers; each has its share of the time that is left, until
    `end` (monotonic seconds). Raises OSError."""
    host, port = address
    places, problem = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), OSError(f"{host} has no address")
    for number, (family, _, _, _, place) in enumerate(places):
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family)
            sock.settimeout(max(0.1, (end - time.monotonic()) / (len(places) - number)))
            sock.connect(place)
        except OSError as error:  # of the kernel too, where it lacks this family
            if sock:
                sock.close()
            problem = error
        else:
            return sock
    raise problem


def _explain(error: ssl.SSLCertVerificationError, name: str, given: bool) -> str:
    problem = error.verify_message
    if "expired" in problem or "not yet valid" in problem:
        return f"its certificate: {problem}; " + ("renew it, or " if given else "") + "set both machines' clocks"
    if "ostname" in problem or "IP address" in problem:
        return f"its certificate is not that of {name}: {problem}"
    return f"its certificate: {problem}" if given else f"JOB_TOKEN does not match, or it is another job ({problem})"
