"""Connects to a peer's tunnel, authenticates it, and requests a service. Runs in a thread."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from rolecall.messages.tunnel import Destination
from rolecall.tunnel.channel import Channel, reason_of
from rolecall.tunnel.keys import Credentials

FIRST_PAUSE_SECONDS = 0.05
CONNECTED, REFUSED = "+", "-"  # first character of a tunnel's answer to a request


class StrangerError(Exception):
    """The peer is not the expected member, or does not accept this rank as one."""


def set_keepalive(sock: socket.socket, lease: float) -> None:
    """Makes the kernel close `sock` if the other machine does not answer for twice the lease (seconds)."""
    seconds = min(max(1, round(lease / 2)), 2**15 - 1)  # Linux takes no more
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2000 * lease))


class OverloadedError(ConnectionError):
    """The other end has closed the connection before it answered: too many unauthenticated connections are there."""


def dial(credentials: Credentials, to: Destination, *, lease: float, is_rank0: bool, seconds: float) -> Channel:
    """Connects to the service of the member that `to` names; `lease` in seconds, `is_rank0` says which member it is.

    Raises StrangerError, and OSError if the member is not reached within `seconds`.
    """
    end, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        try:
            return _dial(credentials, to, lease=lease, is_rank0=is_rank0, end=end)
        except OverloadedError:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)  # exponential backoff
        pause *= 2


def _dial(credentials: Credentials, to: Destination, *, lease: float, is_rank0: bool, end: float) -> Channel:
    with contextlib.ExitStack() as undo:
        sock = connect((to.host, to.port), end)
        undo.callback(sock.close)
        set_keepalive(sock, lease)
        host = credentials.host(to.name, is_rank0)
        channel = Channel(sock, credentials.client if host else credentials.anybody, server=False, host=host)
        try:
            while not channel.handshake():
                channel.wait(end)
            channel.send_text(to.service)
            while (answer := channel.receive_text()) is None:
                channel.wait(end)
        except ConnectionError as error:
            raise OverloadedError(f"hung up before an answer ({error})") from error
        except ssl.SSLZeroReturnError as error:
            raise OverloadedError("hung up before an answer") from error
        except ssl.SSLCertVerificationError as error:
            raise StrangerError(_explain(error, to.name, credentials.given)) from error
        except ssl.SSLError as error:
            text = reason_of(error)
            if "ALERT" in text:  # of the other end, which does not say why
                raise StrangerError(f"it does not take this rank for a member ({text.lower()})") from error
            raise ConnectionError(f"what answers speaks no TLS 1.3 ({text.lower()})") from error
        except ValueError as error:
            raise ConnectionError(f"what answers is no rank ({error})") from error
        if not answer.startswith(CONNECTED):
            raise ConnectionError(answer.removeprefix(REFUSED))
        channel.answer = answer.removeprefix(CONNECTED)
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
        except OSError as error:  # the kernel may lack this family
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
