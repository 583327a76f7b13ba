"""Who is no member comes in nowhere, whatever is sent to the one port: real packets, to the test's own tunnel."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from rolecall.tunnel import keys, places
from rolecall.tunnel.channel import HEAD
from tests.ports import free_ports
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import DEADLINE, TOKEN, Server, Tunnel, dialled, echo, received, until

Authority = tuple[Ed25519PrivateKey, x509.Certificate]
NOW = datetime.datetime.now(datetime.UTC)
HOST = keys.host_of(JOB, RANK_0)


@pytest.fixture(scope="module")
def lead() -> Iterator[Tunnel]:
    """Rank 0's tunnel."""
    (port,) = free_ports(1)
    tunnel = Tunnel(RANK_0, port, port)
    yield tunnel
    tunnel.close()


def client(authority: Authority | None, trusted: x509.Certificate, when: datetime.datetime = NOW) -> ssl.SSLContext:
    """A client with a certificate of `authority` that takes servers of `trusted`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trusted.public_bytes(Encoding.PEM).decode())
    if authority:
        file = os.memfd_create("certificate")
        os.write(file, keys.pem(*keys.issue(*authority, "stranger", when)))
        context.load_cert_chain(f"/proc/self/fd/{file}")
        os.close(file)
    return context


def asks(context: ssl.SSLContext, port: int, service: str, host: str = HOST) -> bytes:
    """What is answered to a service. Raises OSError."""
    with dialled(port) as connection, context.wrap_socket(connection, server_hostname=host) as channel:
        channel.sendall(HEAD.pack(len(service)) + service.encode())
        return channel.recv(1024)[HEAD.size :]


def is_sent_away(context: ssl.SSLContext, port: int, host: str = HOST) -> bool:
    """Whether there is no answer: with TLS 1.3 a client hears of a refusal only after its own end of the handshake."""
    try:
        return asks(context, port, places.CONTROL, host) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def member() -> ssl.SSLContext:
    authority = keys.derive_authority(TOKEN, JOB)
    return client(authority, authority[1])


@pytest.mark.parametrize("service", ["127.0.0.1:22", "store-", "x" * 512])
def test_a_member_cannot_ask_for_what_was_not_announced(lead: Tunnel, service: str) -> None:
    refused = lead.refused("service")
    answer = asks(member(), lead.port, service).decode()
    assert answer.startswith(f"-{service[:64]} ")
    assert "not announced" in answer
    until(lambda: lead.refused("service") > refused, "the refusal")


@pytest.mark.parametrize("words", [b"", HEAD.pack(7) + b"cont"], ids=["at once", "in a word"])
def test_a_member_that_closes_tls_in_order_is_gone(lead: Tunnel, words: bytes) -> None:
    closed = lead.refused("protocol")
    with dialled(lead.port) as connection, member().wrap_socket(connection, server_hostname=HOST) as channel:
        channel.sendall(words)
        with contextlib.suppress(ssl.SSLError):  # it is hung up on, not taken leave of
            channel.unwrap()
    until(lambda: lead.refused("protocol") > closed, "its end")
    assert b"nothing serves control yet" in asks(member(), lead.port, places.CONTROL)


def test_a_member_that_closes_tls_while_data_flows_is_a_lost_peer(lead: Tunnel) -> None:
    seen = list[bytes]()
    server = Server(lambda connection: seen.append(received(connection)))
    service = (reach := lead.reach()).announce(server.port)
    with dialled(lead.port) as connection, member().wrap_socket(connection, server_hostname=HOST) as channel:
        channel.sendall(HEAD.pack(len(service)) + service.encode())
        assert channel.recv(1024)[HEAD.size :] == b"+"
        channel.sendall(HEAD.pack(4) + b"half")
        with contextlib.suppress(OSError):
            channel.unwrap()
    until(lambda: lead.figures["connections"] == 0, "its end")
    assert seen == []  # a reset, which no program takes for an end
    assert b"nothing serves control yet" in asks(member(), lead.port, places.CONTROL)
    assert reach.announce(server.port)


OURS = keys.derive_authority(TOKEN, JOB)
STRANGERS: dict[str, tuple[Authority | None, datetime.datetime]] = {
    "without a certificate": (None, NOW),
    "with another token": (keys.derive_authority(TOKEN[::-1], JOB), NOW),
    "of another job with the same token": (keys.derive_authority(TOKEN, "another"), NOW),
    "with an expired certificate": (OURS, NOW - datetime.timedelta(days=3)),
    "with a certificate that is not valid yet": (OURS, NOW + datetime.timedelta(days=1)),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger(lead: Tunnel, who: str) -> None:
    refused = lead.refused("certificate") + lead.refused("protocol")
    authority, when = STRANGERS[who]
    assert is_sent_away(client(authority, OURS[1], when), lead.port)
    until(lambda: lead.refused("certificate") + lead.refused("protocol") > refused, "the refusal")


def test_a_member_takes_no_server_of_another_job(lead: Tunnel) -> None:
    authority = keys.derive_authority(TOKEN, "another")
    with pytest.raises(ssl.SSLCertVerificationError):
        asks(client(authority, authority[1]), lead.port, places.CONTROL)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        asks(member(), lead.port, places.CONTROL, keys.host_of(JOB, "worker_0"))


def test_tls_1_2_is_not_spoken(lead: Tunnel) -> None:
    context = member()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version|unsupported.protocol"):
        asks(context, lead.port, places.CONTROL)


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\x40\x00" + b"\0" * 2**14],
    ids=["HTTP", "noise", "a long ClientHello"],
)
def test_whatever_is_no_tls_is_hung_up_on(lead: Tunnel, words: bytes) -> None:
    refused = lead.refused("protocol")
    with dialled(lead.port) as connection:
        connection.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            assert len(received(connection)) < 100  # an alert of TLS
    until(lambda: lead.refused("protocol") > refused, "the refusal")


def test_half_a_handshake_is_given_up(lead: Tunnel) -> None:
    late = lead.refused("late")
    hello = first_flight()
    with dialled(lead.port) as silent, dialled(lead.port) as half, dialled(lead.port) as said:
        half.sendall(hello[:100])
        said.sendall(hello)
        for connection in (silent, half, said):
            with contextlib.suppress(ConnectionResetError):
                received(connection)
    until(lambda: lead.refused("late") >= late + 3, "three that were too late")


def first_flight() -> bytes:
    """What a member sends first."""
    arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = member().wrap_bio(arriving, leaving, server_hostname=HOST)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return leaving.read()


def test_ten_thousand_connections_keep_no_member_out(lead: Tunnel) -> None:
    program = (
        "import resource, socket, sys\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "kept = []\n"
        "for number in range(10_000):\n"
        f"    kept.append(socket.create_connection(('127.0.0.1', {lead.port}), 30))\n"
        "    if number % 3 == 0: kept[-1].sendall(b'\\x16\\x03\\x01')\n"
        "    if len(kept) > 2000: kept.pop(0).close()\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    server, reach = Server(echo), lead.reach()
    service = reach.announce(server.port)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as crowd:
        assert crowd.stdout is not None
        until(lambda: lead.refused("overload") > 0, "a crowd")
        before, slowest = lead.process.memory_info().rss, 0.0
        while crowd.poll() is None and lead.refused("overload") + lead.refused("closed") < 9_000:
            begun = time.monotonic()
            assert asks(member(), lead.port, service) == b"+"
            slowest = max(slowest, time.monotonic() - begun)
        assert crowd.stdout.readline() == "done\n"
        assert lead.process.num_fds() < 700
        assert lead.process.memory_info().rss - before < 64 * 2**20
        assert slowest < DEADLINE
        crowd.communicate("")
    assert "Traceback" not in lead.log()
    assert 0 < lead.log().count("connection rejected") < 20  # not one line a stranger


class Between:
    """A man in the middle: passes on what two ends send each other, and does something to it."""

    def __init__(self, port: int, change: Callable[[bytes, bool], bytes]) -> None:
        self.sent = b""  # by the client
        self._port, self._change = port, change
        self._server = Server(self._pass)
        self.port = self._server.port

    def _pass(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port), DEADLINE) as server:
            back = threading.Thread(target=self._copy, args=(server, client, False), daemon=True)
            back.start()
            self._copy(client, server, True)
            back.join(DEADLINE)

    def _copy(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        try:
            while data := source.recv(2**16):
                if forth:
                    self.sent += data
                target.sendall(self._change(data, forth))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("harm", ["a bit forth", "a bit back", "dropped"])
def test_a_man_in_the_middle_gets_a_lost_peer_never_other_bytes(lead: Tunnel, harm: str) -> None:
    armed, harmed = threading.Event(), threading.Event()

    def change(data: bytes, forth: bool) -> bytes:
        if not armed.is_set() or harmed.is_set() or forth == (harm == "a bit back"):
            return data
        harmed.set()
        return b"" if harm == "dropped" else data[:-1] + bytes([data[-1] ^ 1])

    between = Between(lead.port, change)
    (port,) = free_ports(1)
    worker, seen, size = Tunnel("worker_0", port, lead.port), bytearray(), 3 * 2**20

    def collect(connection: socket.socket) -> None:
        while data := connection.recv(2**16):
            seen.extend(data)
            connection.sendall(data)

    def send(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"b" * size)

    try:
        reaches = lead.reach(), worker.reach()
        service = reaches[0].announce(Server(collect).port)
        with dialled(reaches[1].port_to(RANK_0, "127.0.0.1", between.port, service)) as connection:
            connection.sendall(b"a" * 1000)
            assert connection.recv(1000, socket.MSG_WAITALL) == b"a" * 1000
            armed.set()
            threading.Thread(target=send, args=(connection,), daemon=True).start()
            got = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(2**16):
                    got += data
        assert harmed.is_set()
        assert len(got) < size, "nobody noticed"
        assert bytes(seen) == b"a" * 1000 + b"b" * (len(seen) - 1000)
        assert bytes(got) == b"b" * len(got)
    finally:
        worker.close()


def test_a_connection_that_was_recorded_says_nothing_and_is_of_no_use_later(lead: Tunnel) -> None:
    between = Between(lead.port, lambda data, forth: data)
    asks(member(), between.port, places.CONTROL)
    for secret in (TOKEN.encode(), places.CONTROL.encode(), JOB.encode(), RANK_0.encode()):
        assert secret not in between.sent
    protocol = lead.refused("protocol") + lead.refused("late")
    with dialled(lead.port) as connection:
        connection.sendall(between.sent)
        with contextlib.suppress(ConnectionResetError):
            answer = received(connection)
            assert b"nothing serves" not in answer
    until(lambda: lead.refused("protocol") + lead.refused("late") > protocol, "the refusal")


# ---- a user's own certificates


def test_a_users_certificates_and_their_renewal(tmp_path: Path) -> None:
    def write(authority: Authority, host: str = "127.0.0.1") -> x509.Certificate:
        key, certificate = keys.issue(*authority, "")
        builder = (
            x509.CertificateBuilder()
            .subject_name(certificate.subject)
            .issuer_name(authority[1].subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - keys.SKEW)
            .not_valid_after(NOW + keys.LIFE)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), False)
        )
        certificate = builder.sign(authority[0], None)
        (tmp_path / "tls.key").write_bytes(keys.pem(key, certificate).split(b"-----BEGIN CERT")[0])
        (tmp_path / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        return certificate

    def serial(context: ssl.SSLContext) -> int:
        with dialled(port) as connection, context.wrap_socket(connection, server_hostname="127.0.0.1") as channel:
            return x509.load_der_x509_certificate(channel.getpeercert(binary_form=True) or b"").serial_number

    users, other = (keys.derive_authority(TOKEN, name) for name in ("the user's", "another of the user's"))
    (tmp_path / "ca.crt").write_bytes(users[1].public_bytes(Encoding.PEM))
    first = write(users)
    port, second_port = free_ports(2)
    files = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}
    settings = {name: str(tmp_path / file) for name, file in files.items()} | {
        "job_token": "",
        "master_addr": "127.0.0.1",
    }
    lead, worker = (Tunnel(name, own, port, **settings) for name, own in ((RANK_0, port), ("w_0", second_port)))
    try:
        context = client(users, users[1])
        assert serial(context) == first.serial_number
        reaches = lead.reach(), worker.reach()
        service = reaches[0].announce(Server(echo).port)
        with dialled(reaches[1].port_to(RANK_0, "127.0.0.1", port, service)) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            (tmp_path / "tls.crt").write_text("torn")
            until(lambda: lead.refused("renewal") > 0, "the complaint")
            assert serial(context) == first.serial_number
            second = write(users)
            until(lambda: serial(context) == second.serial_number, "the new certificate")
            connection.sendall(b"y")
            assert connection.recv(1) == b"y"
        assert is_sent_away(client(other, users[1]), port, "127.0.0.1")
    finally:
        lead.close()
        worker.close()


LIMITS = """
import resource
from rolecall import secret
secret.forbid_core_dumps()
secret.forbid_core_dumps()
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""
ENTRY = """
import contextlib, resource
from rolecall.__main__ import main
with contextlib.suppress(SystemExit):
    main(["run", "no-such-file.py"])
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_no_core_dump_is_left() -> None:
    for program in (LIMITS, ENTRY):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        assert all(0 <= int(limit) <= 1 for limit in ended.stdout.split()[-2:]), program
