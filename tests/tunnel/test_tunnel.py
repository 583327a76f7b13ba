"""What passes through two tunnels: all of it, both ways, to its end, and no more than one end takes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rolecall.config import Settings
from rolecall.errors import PeerLostError, UsageError
from rolecall.tunnel import keys, local, places
from rolecall.tunnel.handle import Handle
from rolecall.tunnel.local import loopback_listener
from rolecall.tunnel.relay import Rewrite
from tests.ports import free_ports
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import Server, Tunnel, dialled, echo, received, until

MEGABYTE = 2**20
Pair = tuple[Tunnel, Tunnel]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Rank 0's tunnel and another member's."""
    port, other = free_ports(2)
    tunnels = Tunnel(RANK_0, port, port), Tunnel("worker_0", other, port)
    yield tunnels
    for tunnel in tunnels:
        tunnel.close()


def led(pair: Pair, server: Server) -> int:
    """A port that leads from the other member to `server`, which is rank 0's."""
    lead, worker = pair
    reaches = lead.reach(), worker.reach()
    _kept.extend(reaches)
    service = reaches[0].announce(server.port)
    return reaches[1].port_to(lead.name, "127.0.0.1", lead.port, service)


_kept: list[object] = []


def test_a_folder_with_too_long_a_path_is_refused(tmp_path: Path) -> None:
    settings = Settings(job=JOB, port=free_ports(1)[0], bind_addr="127.0.0.1", job_token=keys.new_token())
    with pytest.raises(UsageError, match=r"^TMPDIR=.*a shorter path"):
        Handle(settings, JOB, RANK_0, RANK_0, tmp_path / ("x" * 120))


def test_what_is_sent_comes_back(pair: Pair) -> None:
    port = led(pair, Server(echo))
    data = os.urandom(3 * MEGABYTE + 1)
    with dialled(port) as connection:
        for size in (1, 2**18 - 1, 2**18, 2**18 + 1, len(data)):
            threading.Thread(target=connection.sendall, args=(data[:size],), daemon=True).start()
            back = b""
            while len(back) < size:
                back += connection.recv(MEGABYTE)
            assert back == data[:size]


def test_many_connections_at_once_are_kept_apart(pair: Pair) -> None:
    port, problems = led(pair, Server(echo)), list[int]()

    def one(number: int) -> None:
        data = bytes([number]) * MEGABYTE
        with dialled(port) as connection:
            threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
            back = b""
            while len(back) < len(data):
                back += connection.recv(MEGABYTE)
            if back != data:
                problems.append(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_an_end_of_one_direction_is_passed_on(pair: Pair) -> None:
    def digest(connection: socket.socket) -> None:
        connection.sendall(hashlib.sha256(received(connection)).digest())

    data = os.urandom(MEGABYTE)
    with dialled(led(pair, Server(digest))) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == hashlib.sha256(data).digest()


def test_a_reset_is_a_reset_at_the_other_end(pair: Pair) -> None:
    def reset(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with dialled(led(pair, Server(reset))) as connection:
        connection.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            received(connection)


def test_nobody_listens_any_more(pair: Pair) -> None:
    server = Server(echo)
    port = led(pair, server)
    server.close()
    with dialled(port) as connection, pytest.raises(ConnectionResetError):
        received(connection)


def test_a_peer_that_stops_reading_stops_the_other_and_costs_no_memory(pair: Pair) -> None:
    go, total = threading.Event(), 64 * MEGABYTE

    def wait(connection: socket.socket) -> None:
        go.wait(30)
        connection.sendall(hashlib.sha256(received(connection)).digest())

    def resident() -> int:
        return sum(tunnel.process.memory_info().rss for tunnel in pair)

    with dialled(led(pair, Server(wait))) as connection:
        before, sent, digest = resident(), 0, hashlib.sha256()
        connection.setblocking(False)
        piece, stuck_since = os.urandom(MEGABYTE), time.monotonic()
        while sent < total and time.monotonic() - stuck_since < 1:
            try:
                count = connection.send(piece)
            except BlockingIOError:
                time.sleep(0.01)  # whether it stays so is the question
                continue
            digest.update(piece[:count])
            sent, stuck_since = sent + count, time.monotonic()
        assert sent < total
        assert resident() - before < 16 * MEGABYTE
        go.set()
        connection.settimeout(30)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == digest.digest()


def test_thousands_of_small_messages_that_piled_up_arrive(pair: Pair) -> None:
    go, count = threading.Event(), 6000

    def wait(connection: socket.socket) -> None:
        go.wait(30)
        connection.sendall(hashlib.sha256(received(connection)).digest())

    with dialled(led(pair, Server(wait))) as connection:
        bytes_before = pair[1].figures["bytes"]
        connection.sendall(b"first")
        until(lambda: pair[1].figures["bytes"] > bytes_before, "the first")
        pair[0].process.suspend()  # what arrives there piles up, a frame for each
        try:
            for number in range(count):
                connection.sendall(number.to_bytes(4, "big") * 10)
        finally:
            pair[0].process.resume()
        go.set()
        connection.shutdown(socket.SHUT_WR)
        data = b"first" + b"".join(number.to_bytes(4, "big") * 10 for number in range(count))
        assert received(connection) == hashlib.sha256(data).digest()


def test_it_listens_before_its_peer_announces(pair: Pair) -> None:
    lead, worker = pair
    server, reach, other = Server(echo), lead.reach(), worker.reach()
    port = other.port_to(lead.name, "127.0.0.1", lead.port, places.store(7))
    with dialled(port) as connection:
        connection.sendall(b"early")
        with dialled(other.port_to(lead.name, "127.0.0.1", lead.port, places.store(8))) as late:
            reach.announce(server.port, places.store(7))
            assert connection.recv(5) == b"early"
            with pytest.raises(ConnectionResetError):  # of CONNECT_TIMEOUT, 5 s
                received(late)


def test_what_a_worker_announced_ends_with_it(pair: Pair) -> None:
    lead, worker = pair
    program = (
        "import sys; from pathlib import Path; from rolecall.tunnel.client import TunnelClient\n"
        "reach = TunnelClient(Path(sys.argv[1]), 'lead_0', '', 0)\n"
        "print(reach.announce(int(sys.argv[2])), flush=True)\n"
        "sys.stdin.read()"
    )
    server = Server(echo)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(lead.directory), str(server.port)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    service, reach = process.stdout.readline().strip(), worker.reach()
    port = reach.port_to(lead.name, "127.0.0.1", lead.port, service)
    with dialled(port) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
    process.kill()
    process.wait()
    refused = lead.refused("service")
    with dialled(port) as connection, pytest.raises(ConnectionResetError):
        received(connection)
    until(lambda: lead.refused("service") > refused, "the refusal")


def test_another_user_of_this_machine_is_not_let_through(pair: Pair) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    port = led(pair, Server(echo))
    program = (
        f"import encodings.idna, os, socket; os.setuid(65534)\n"
        f"c = socket.create_connection(('127.0.0.1', {port}), 10)\n"
        "try: c.sendall(b'x'); print(c.recv(1))\nexcept OSError as error: print(type(error).__name__)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() in ("b''", "ConnectionResetError", "BrokenPipeError")
    with dialled(port) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "mapped"])
def test_the_user_at_the_other_end(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as client:
        prefix = "::ffff:" if family == socket.AF_INET6 else ""
        client.connect((f"{prefix}127.0.0.1", listener.getsockname()[1]))
        connection, _ = listener.accept()
        with connection:
            ends = connection.getpeername(), connection.getsockname()
            assert local.user_by_netlink(*ends) == local.user_by_table(*ends) == os.getuid()
            assert local.same_user(connection)
    nobody = ("127.0.0.1", 1), ("127.0.0.1", 2)
    assert local.user_by_netlink(*nobody) is None
    assert local.user_by_table(*nobody) is None


def test_a_rank_reaches_rank_0_before_it_has_a_place_and_peers_once_it_has(pair: Pair) -> None:
    lead, _ = pair
    (port,) = free_ports(1)
    member = Tunnel("-", port, lead.port)
    try:
        server = Server(echo)
        service = member.reach()
        name = service.announce(server.port)
        reach = lead.reach()
        stranger = reach.port_to("worker_5", "127.0.0.1", port, name)
        with dialled(stranger) as connection, pytest.raises(ConnectionResetError):
            received(connection)
        until(lambda: "its certificate is not that of worker_5" in lead.log(), "why")
        member.place("worker_5")
        until(lambda: _answers(reach.port_to("worker_5", "127.0.0.1", port, name)), "the member in its place")
    finally:
        member.close()


def _answers(port: int) -> bool:
    with dialled(port) as connection:
        connection.sendall(b"x")
        try:
            return connection.recv(1) == b"x"
        except ConnectionResetError:
            return False


def test_signals_are_the_supervisors_and_its_end_is_the_tunnels(pair: Pair) -> None:
    port, rank0 = free_ports(2)
    tunnel = Tunnel("worker_9", port, rank0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        tunnel.process.send_signal(number)
    tunnel.reach()  # it answers still
    tunnel.kill_supervisor()
    tunnel.process.wait(10)
    assert not psutil.pid_exists(tunnel.process.pid)
    with pytest.raises(PeerLostError, match="this rank's tunnel cannot be reached"):
        tunnel.reach()


def test_a_listener_sorts_before_another_as_gloo_compares() -> None:
    def as_read(port: int) -> int:
        return int.from_bytes(port.to_bytes(2, "big"), sys.byteorder)

    for below in (32768, 33024, 40001, 43520, 60999, 65535, 61440):
        for _ in range(20):
            with loopback_listener(below) as listener:
                assert as_read(listener.getsockname()[1]) < as_read(below)
    with loopback_listener(digits=4) as listener:
        assert 1024 <= listener.getsockname()[1] <= 9999


def test_a_listener_sorts_before_another_where_the_one_assigned_port_that_does_is_taken() -> None:
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # another process has it
            taken.bind(("127.0.0.1", 32768))
            taken.listen()
        with loopback_listener(33024) as listener:
            port = listener.getsockname()[1]
    assert port % 256 == 0
    assert 1024 <= port < 32768


@pytest.mark.parametrize("size", [1, 7, 8, 50, 1000])
def test_only_a_first_message_is_rewritten(size: int) -> None:
    def message(body: bytes) -> bytes:
        return len(body).to_bytes(8, "little") + body

    old, new = b"127.0.0.1:40059", b"127.0.0.1:38000"
    data = message(b"\xb9uv\x0f" + old + b"basic") + message(b"tensor " + old)
    rewrite, out = Rewrite(old, new), b""
    for begin in range(0, len(data), size):
        out += rewrite.pass_on(data[begin : begin + size]) if not rewrite.done else data[begin : begin + size]
    assert out == message(b"\xb9uv\x0f" + new + b"basic") + message(b"tensor " + old)
    assert rewrite.done
    long = (2**20).to_bytes(8, "little") + old
    assert Rewrite(old, new).pass_on(long) == long
