"""Workers behind the tunnels of their ranks, and everybody else at their one port: real sockets, real packets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from rolecall.errors import PeerLostError
from rolecall.tunnel import keys, places, tickets
from rolecall.tunnel.client import TunnelClient
from rolecall.wire import connecting
from rolecall.wire.connecting import Hello, HelloReply, receive_hello, send_hello
from rolecall.wire.messages import Deadline
from tests.ports import free_ports
from tests.tunnel.test_strangers import OURS, Between, client, member
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import TOKEN, Tunnel, dialled, received
from tests.wire.test_connecting import call
from tests.wire.wires import DEADLINE, until
from tests.wire.workers import Worker

HOST = keys.host_of(JOB, RANK_0)
SERVICE = places.wire(1)
MARKER = b"a marker that nobody else may read "
Ranks = tuple[Tunnel, Tunnel]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """The tunnels of rank 0 and of another member."""
    port, other = free_ports(2)
    tunnels = Tunnel(RANK_0, port, port), Tunnel("worker_0", other, port)
    yield tunnels
    for tunnel in tunnels:
        tunnel.close()


class Pair:
    """Workers of rank 0 and of another member; the latter reaches the former at `port`."""

    def __init__(self, ranks: Ranks, port: int = 0, generation: int = 1, seconds: float = 10.0) -> None:
        self.rank0 = Worker(RANK_0, tunnel=ranks[0], generation=generation)
        self.worker = Worker("worker_0", tunnel=ranks[1], generation=generation, seconds=seconds)
        self.worker.knows(self.rank0, port=port)

    def call(self, method: str, *args: Any) -> Any:
        return call(self.worker, RANK_0, method, *args)


def ticket(ranks: Ranks, service: str = SERVICE) -> str:
    with contextlib.closing(TunnelClient(ranks[1].directory, "worker_0", "", 0)) as tunnel:
        return tunnel.ticket(RANK_0, "127.0.0.1", ranks[0].port, service, 5.0)


def shows(port: int, words: bytes, context: ssl.SSLContext) -> bool:
    """Whether somebody with `words` as a ticket and the certificate of `context` gets an answer to a hello."""
    try:
        with dialled(port) as connection:
            connection.sendall(words)
            with context.wrap_socket(connection, server_hostname=HOST) as channel:
                send_hello(channel, Hello("worker_0", RANK_0, JOB, 1, 0, 0, os.urandom(4).hex(), "out"))
                return not receive_hello(HelloReply, channel, time.monotonic() + DEADLINE).problem
    except (OSError, ValueError):
        return False


def test_calls_and_streams_between_ranks(ranks: Ranks) -> None:
    pair = Pair(ranks)
    tensor = torch.rand(3_000_000)
    assert torch.equal(pair.call("echo", tensor), tensor)
    assert [pair.call("echo", number) for number in range(100)] == list(range(100))
    (link,) = pair.rank0.wire._links._accepted
    assert isinstance(link._sockets.incoming, ssl.SSLSocket)
    assert link._sockets.incoming is not link._sockets.outgoing
    assert link._sockets.incoming.version() == "TLSv1.3"


def test_a_ticket_is_good_once_and_for_who_has_a_certificate(ranks: Ranks) -> None:
    pair, port = Pair(ranks), ranks[0].port
    assert shows(port, tickets.preamble(ticket(ranks)), member())
    used = tickets.preamble(ticket(ranks))
    assert shows(port, used, member())
    refused = ranks[0].refused("ticket")
    assert not shows(port, used, member())
    assert not shows(port, tickets.preamble(os.urandom(16).hex()), member())
    until(lambda: ranks[0].refused("ticket") >= refused + 2, "the refusals")
    another = keys.derive_authority(TOKEN, "another")
    for context in (client(None, OURS[1]), client(keys.derive_authority(TOKEN[::-1], JOB), OURS[1])):
        assert not shows(port, tickets.preamble(ticket(ranks)), context)
    assert not shows(port, tickets.preamble(ticket(ranks)), client(another, OURS[1]))
    assert not shows(port, b"", member())  # by way of the tunnel, which knows no such service
    assert pair.call("echo", 1) == 1


def test_only_the_worker_of_the_generation_gives_tickets(ranks: Ranks) -> None:
    Pair(ranks)
    with pytest.raises(PeerLostError, match="in time"):
        ticket(ranks, places.wire(0))
    old = Worker("worker_0", tunnel=ranks[1], generation=0, seconds=0.5)
    old.dialer.addresses[RANK_0] = connecting.Address(RANK_0, "127.0.0.1", ranks[0].port)
    with pytest.raises(PeerLostError):
        old.wire.connect(RANK_0, Deadline(DEADLINE))


def test_a_worker_takes_the_calls_of_its_next_part(ranks: Ranks) -> None:
    """Its tunnel may notice the end of the part before late."""
    pair = Pair(ranks)
    assert pair.call("echo", 1) == 1
    for join in (1, 2, 3):
        pair.worker.session.end()
        pair.worker = Worker("worker_0", tunnel=ranks[1], join=join)
        pair.worker.knows(pair.rank0)
        pair.rank0.dialer.addresses["worker_0"] = pair.worker.address
        assert pair.call("echo", 2) == 2
        assert call(pair.rank0, "worker_0", "echo", 3) == 3


def test_an_old_ticket_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "TICKET_SECONDS", -1.0)
    issued = tickets.Tickets()
    assert issued.redeem(bytes.fromhex(issued.issue("x"))) == ""
    monkeypatch.setattr(tickets, "TICKET_SECONDS", 10.0)
    monkeypatch.setattr(tickets, "MAX_TICKETS", 3)
    given = [bytes.fromhex(issued.issue(str(number))) for number in range(4)]
    assert [issued.redeem(each) for each in given] == ["", "1", "2", "3"]
    assert [issued.redeem(each) for each in given] == ["", "", "", ""]


class Robber(Between):
    """Takes the first `count` tickets that pass, and uses each before its owner does."""

    def __init__(self, port: int, count: int) -> None:
        self.robbed, self._count = list[socket.socket](), count
        super().__init__(port, self._rob)

    def _rob(self, data: bytes, forth: bool) -> bytes:
        if forth and data.startswith(tickets.MAGIC) and len(self.robbed) < self._count:
            robbed = socket.create_connection(("127.0.0.1", self._port), DEADLINE)
            robbed.sendall(data[: tickets.PREAMBLE_BYTES])
            self.robbed.append(robbed)
            threading.Event().wait(0.1)  # so that the tunnel reads the stolen one first
        return data


def test_who_steals_tickets_only_delays_their_owner(ranks: Ranks) -> None:
    robber = Robber(ranks[0].port, 3)
    pair = Pair(ranks, robber.port)
    assert pair.call("echo", 1) == 1
    assert len(robber.robbed) == 3
    for robbed in robber.robbed:
        robbed.sendall(b"\x16\x03\x01\0\4junk")
        with contextlib.suppress(ConnectionResetError):
            assert len(received(robbed)) < 100
    assert pair.call("echo", 2) == 2
    assert len(pair.rank0.wire._links._accepted) == 1


@pytest.mark.parametrize("harm", ["a bit forth", "a bit back", "dropped", "cut"])
def test_what_is_changed_on_its_way_is_a_lost_peer(ranks: Ranks, harm: str) -> None:
    armed, harmed = threading.Event(), threading.Event()

    def change(data: bytes, forth: bool) -> bytes:
        if not armed.is_set() or harmed.is_set() or forth == (harm == "a bit back") or len(data) < 100:
            return data
        harmed.set()
        if harm == "cut":
            raise OSError("cut")
        return data[50:] if harm == "dropped" else data[:60] + bytes([data[60] ^ 1]) + data[61:]

    between = Between(ranks[0].port, change)
    pair = Pair(ranks, between.port)
    assert pair.call("echo", MARKER) == MARKER
    armed.set()
    data = b"b" * 3_000_000
    with contextlib.suppress(PeerLostError):
        while (back := pair.call("echo", data)) == data:
            pass
        raise AssertionError(f"something else has arrived: {back[:100]!r}")
    assert harmed.is_set()
    assert set(pair.rank0.member.seen) <= {None}


def test_what_passes_by_is_no_plain_text_and_of_no_use_later(ranks: Ranks) -> None:
    seen, sent = list[bytes](), list[bytes]()

    def keep(data: bytes, forth: bool) -> bytes:
        seen.append(data)
        if forth:
            sent.append(data)
        return data

    pair = Pair(ranks, Between(ranks[0].port, keep).port)
    assert pair.call("count_calls") == 1
    recorded = [b"".join(sent), *sent]
    assert pair.call("echo", MARKER * 10_000) == MARKER * 10_000
    everything = b"".join(seen)
    assert len(everything) > 2 * 10_000 * len(MARKER)
    for secret in (MARKER, MARKER[:12], TOKEN.encode(), JOB.encode(), RANK_0.encode(), b"echo", SERVICE.encode()):
        assert secret not in everything
    for words in recorded:
        with dialled(ranks[0].port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(words)
            received(connection)  # a ServerHello, at most, which only its maker can go on from
    assert len(pair.rank0.wire._links._accepted) == 1
    assert pair.call("count_calls") == 2


def test_half_a_link_is_closed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "HELLO_SECONDS", 3.0)
    pair, port = Pair(ranks), ranks[0].port

    def half(direction: Literal["out", "back"], link: str) -> str:
        with dialled(port) as connection:
            connection.sendall(tickets.preamble(ticket(ranks)))
            with member().wrap_socket(connection, server_hostname=HOST) as channel:
                send_hello(channel, Hello("w", RANK_0, JOB, 1, 0, 0, link, direction))
                answer = receive_hello(HelloReply, channel, time.monotonic() + DEADLINE).problem
                channel.settimeout(DEADLINE)
                with contextlib.suppress(ssl.SSLError, ConnectionResetError):
                    assert channel.recv(1) == b""  # it is hung up on
                return answer

    assert half("out", "one") == ""
    assert half("back", "two") == "the other connection of this link was given up"
    until(lambda: not pair.rank0.acceptor._halves and not pair.rank0.acceptor._handshakes, "their end")
    assert pair.call("echo", 1) == 1


def test_connections_that_stop_within_a_ticket_cost_no_time(ranks: Ranks) -> None:
    Pair(ranks)
    late = ranks[0].refused("late")
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(dialled(ranks[0].port)).sendall(tickets.MAGIC[:3])
        begun = ranks[0].process.cpu_times()
        until(lambda: ranks[0].refused("late") >= late + 50, "their end")
        now = ranks[0].process.cpu_times()
        assert now.user + now.system - begun.user - begun.system < 1.0  # of five seconds
    for words in (tickets.MAGIC[:3] + b"x" * 30, b"\0", tickets.MAGIC):
        with dialled(ranks[0].port) as connection:
            connection.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                try:
                    connection.shutdown(socket.SHUT_WR)
                except OSError as error:
                    if error.errno == errno.ENOTCONN:  # it was reset before that
                        continue
                    raise
                assert received(connection) == b""


def test_tickets_without_a_handshake_are_bounded(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "MAX_HANDSHAKES", 8)
    pair = Pair(ranks)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(dialled(ranks[0].port)).sendall(tickets.preamble(ticket(ranks)))
        until(lambda: len(pair.rank0.acceptor._handshakes) == 8, "the bound")
        assert pair.call("echo", 1) == 1
