"""Connections between workers: by a Unix socket on one machine, by TLS or, with TLS=off, unencrypted between machines.

Between machines a connection comes in at the rank's one port. The peer's tunnel gives a ticket for it, and hands it to
the peer's worker, with which this worker makes a mutual TLS handshake. A link takes two such connections, one for each
direction.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

from rolecall import telemetry
from rolecall.errors import PeerLostError
from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import Certificate
from rolecall.tunnel import keys, places
from rolecall.tunnel.client import TunnelClient
from rolecall.tunnel.dial import connect, set_keepalive
from rolecall.tunnel.local import process_at, same_user, unix_listener
from rolecall.tunnel.tickets import preamble
from rolecall.wire import apart, clock, memory
from rolecall.wire.link import Sockets
from rolecall.wire.memory import Region
from rolecall.wire.session import Session

HELLO_SECONDS = 5.0  # from a connection to the end of its hello, and from that to the link's other connection
MAX_HELLO_BYTES = 4096
MAX_HANDSHAKES = 256  # connections, a thread each, that are no link yet; a further one replaces the oldest
RETRY_SECONDS = 0.05
CERTIFICATE_SECONDS = 10.0  # that a worker uses the certificate of its tunnel
SOCKET_BYTES = 4 * 2**20  # of a Unix socket's buffer
LOG_REPEAT_SECONDS = 30.0
LENGTH = struct.Struct("!H")
Direction = Literal["both", "out", "back"]  # of a connection's frames: as its maker sees it
Medium = Literal["unix", "tcp", "tls"]
H = TypeVar("H", "Hello", "HelloReply")


class Address(NamedTuple):
    """Where a member's worker is reached: at the Unix socket `path` of the machine `machine`, or at its rank's `host`
    and `port`, as its part number `join` of the generation."""

    name: str
    host: str
    port: int
    path: str = ""
    machine: str = ""
    join: int = 0


class Probe(Struct, frozen=True):
    """Bytes of a process's memory, for the other end of a connection to try to read."""

    address: int
    content: bytes


class Hello(Struct, frozen=True):
    """What the maker of a connection says first: who it is, whom it wants, and which connections belong together.
    `join` is the number of its part in the generation, `callee_join` that of the one that it wants."""

    caller: str
    callee: str
    job: str
    generation: int
    join: int
    callee_join: int
    link: str
    direction: Direction
    probe: Probe | None = None


class HelloReply(Struct, frozen=True, omit_defaults=True):
    """The answer to a hello: the `problem`, if there is one, and whether this process reads the other's memory. The
    maker of a Unix connection says the latter too."""

    problem: str = ""
    reads: bool = False
    probe: Probe | None = None


class WorkerIdentity(NamedTuple):
    """A worker, for its peers: its part number `join` of a generation."""

    name: str
    job: str
    generation: int
    lease: float
    join: int = 0


def machine_id() -> str:
    """What the workers of one machine have in common; it says nothing about other machines."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---- hello


def send_hello(sock: socket.socket, message: Hello | HelloReply) -> None:
    """Sends a hello or a reply."""
    body = encode(message)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive_hello(kind: type[H], sock: socket.socket, end: float) -> H:
    """The hello or the reply that the other end sends until `end`, in monotonic seconds. Raises OSError and
    ValueError."""
    (length,) = LENGTH.unpack(_receive(sock, LENGTH.size, end))
    if length > MAX_HELLO_BYTES:
        raise ValueError("its hello is too long")
    message: H = decode(kind, _receive(sock, length, end))
    return message


def _receive(sock: socket.socket, count: int, end: float) -> bytes:
    arrived = b""
    while len(arrived) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("its hello has not come in time")
        sock.settimeout(left)
        more = sock.recv(count - len(arrived))
        if not more:
            raise ConnectionError("the connection was closed")
        arrived += more
    return arrived


def _widen(sock: socket.socket) -> None:
    """Gives a Unix socket more room than the kernel's default."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


def _probe() -> Probe:
    return Probe(memory.address_of(memory.PROBE.data), memory.PROBE.tobytes())


def _reads(sock: socket.socket, probe: Probe | None) -> int:
    """The process at the other end of a Unix socket, if this one may read its memory; otherwise 0."""
    if probe is None or not probe.content:
        return 0
    pid, _ = process_at(sock)
    region = Region(probe.address, len(probe.content))
    return pid if memory.may_read(pid, region, probe.content) else 0


class Tls:
    """The TLS contexts of this worker, made from the certificate that its tunnel gives."""

    def __init__(self, tunnel: Callable[[], TunnelClient], job: str, master_addr: str) -> None:
        self._tunnel, self._job, self._master_addr = tunnel, job, master_addr
        self._lock = threading.Lock()
        self._made_at = float("-inf")
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]
        self._certificate: Certificate

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._made_at > CERTIFICATE_SECONDS:
                with contextlib.closing(self._tunnel()) as tunnel:
                    self._certificate = tunnel.certificate()
                self._contexts = keys.contexts(self._certificate.authority, self._certificate.chain)
                self._made_at = time.monotonic()

    def server(self, sock: socket.socket) -> ssl.SSLSocket:
        """The end of whoever accepted `sock`, before the handshake. Raises OSError."""
        self._refresh()
        return self._contexts[0].wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def client(self, sock: socket.socket, peer: str, is_rank0: bool) -> ssl.SSLSocket:
        """Makes the handshake with the member `peer`. Raises OSError."""
        self._refresh()
        host = keys.host_of(self._job, peer)
        if self._certificate.given:
            if not is_rank0:  # of the user's certificates, rank 0's alone must carry a known name
                return self._contexts[2].wrap_socket(sock)
            host = self._master_addr
        return self._contexts[1].wrap_socket(sock, server_hostname=host)


# ---- the end that is called


class PendingHandshake:
    """A connection that is no link yet, and that has a thread."""

    def __init__(self, sock: socket.socket, kind: Medium) -> None:
        self.sock, self.kind = sock, kind
        self.joined = threading.Event()  # the link's other connection has come, or nobody waits for it any more

    def stop(self) -> None:
        """Ends its thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        self.joined.set()


class Acceptor:
    """Takes the connections to this worker until the end of `session`. Calls `accepted(peer, sockets)` for each link,
    from another thread.

    Connections that are no link cost at most MAX_HANDSHAKES threads, each for twice HELLO_SECONDS.
    """

    def __init__(
        self,
        me: WorkerIdentity,
        tls: Tls | None,
        accepted: Callable[[str, Sockets], None],
        session: Session,
    ) -> None:
        self._me, self._tls, self._accepted, self._session = me, tls, accepted, session
        self._handshakes: dict[PendingHandshake, None] = {}  # the oldest first
        self._halves: dict[tuple[str, str], PendingHandshake] = {}  # "out" connections, by caller and link
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._session.on_end(self._stop_handshakes)

    def listen_unix(self, path: Path) -> None:
        """Takes connections of this user's processes at the socket `path`."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._serve(unix_listener(path), "unix")
        self._session.on_end(lambda: path.unlink(missing_ok=True))

    def listen_tcp(self, listener: socket.socket) -> int:
        """Takes unencrypted connections to `listener`. Returns its port."""
        self._serve(listener, "tcp")
        return int(listener.getsockname()[1])

    def listen_tunnel(self, tunnel: TunnelClient) -> None:
        """Takes the connections that the rank's tunnel hands over."""
        receiver = tunnel.receive_forever(places.wire(self._me.generation, self._me.join))

        def receive() -> None:
            with receiver:
                while True:
                    try:
                        message, files, _, _ = socket.recv_fds(receiver, 16, 4)
                    except OSError:
                        return
                    if not message:
                        return  # the tunnel has ended, and with it this rank; or the session
                    for file in files:
                        self._begin(socket.socket(fileno=file), "tls")

        self._read(receiver, receive, "tunnel")

    def _serve(self, listener: socket.socket, kind: Medium) -> None:
        def accept() -> None:
            with listener:
                while not self._session.ended:
                    try:
                        sock, _ = listener.accept()
                    except OSError:  # it has gone, or no file is left; or the session has ended
                        if not self._session.ended:
                            time.sleep(RETRY_SECONDS)
                        continue
                    if kind == "unix" and not same_user(sock):
                        sock.close()
                    else:
                        self._begin(sock, kind)

        self._read(listener, accept, kind)

    def _read(self, sock: socket.socket, read: Callable[[], None], what: str) -> None:
        """Reads `sock` in a thread, which ends, and closes it, with the session."""
        thread = threading.Thread(target=read, name=f"wire {what}", daemon=True)
        thread.start()

        def end() -> None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join(HELLO_SECONDS)  # its socket is closed then: a port is free

        self._session.on_end(end)

    def _begin(self, sock: socket.socket, kind: Medium) -> None:
        handshake, oldest = PendingHandshake(sock, kind), None
        with self._lock:
            if self._session.ended:
                sock.close()
                return
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
            self._handshakes[handshake] = None
        if oldest:
            oldest.stop()
        if not apart.start("wire hello", self._greet, handshake):  # its maker tries again
            sock.close()
            with self._lock:
                self._handshakes.pop(handshake, None)

    def _stop_handshakes(self) -> None:
        with self._lock:
            handshakes = list(self._handshakes)
        for handshake in handshakes:
            handshake.stop()

    def _greet(self, handshake: PendingHandshake) -> None:
        try:
            self._exchange(handshake)
        except (OSError, ValueError, PeerLostError) as error:
            handshake.sock.close()
            now = time.monotonic()
            if now - self._logged_at > LOG_REPEAT_SECONDS and not self._session.ended:
                self._logged_at = now
                problem = str(error) or type(error).__name__
                telemetry.log().info("a connection to this worker failed", problem=problem)
        finally:
            with self._lock:
                self._handshakes.pop(handshake, None)

    def _exchange(self, handshake: PendingHandshake) -> None:
        sock, kind, end = handshake.sock, handshake.kind, time.monotonic() + HELLO_SECONDS
        sock.settimeout(HELLO_SECONDS)
        if kind == "unix":
            _widen(sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_keepalive(sock, self._me.lease)
        if kind == "tls":
            assert self._tls is not None
            sock = handshake.sock = secured = self._tls.server(sock)
            secured.do_handshake()
        hello = receive_hello(Hello, sock, end)
        if (hello.direction == "both") == (kind == "tls"):  # the directions of TLS have a connection each
            raise ValueError(f"its hello has the direction {hello.direction}")
        if problem := self._problem(hello):
            send_hello(sock, HelloReply(problem))
            raise ConnectionError(f"{hello.caller} was refused: {problem}")
        match hello.direction:
            case "both":
                pid, read_by_peer = 0, False
                if kind == "unix":
                    pid = _reads(sock, hello.probe)
                    send_hello(sock, HelloReply(reads=bool(pid), probe=_probe()))
                    read_by_peer = receive_hello(HelloReply, sock, end).reads
                else:
                    send_hello(sock, HelloReply())
                sock.settimeout(None)
                self._accepted(hello.caller, Sockets(sock, sock, pid, read_by_peer, hello.join))
            case "out":
                self._await_other(hello, handshake)
            case _:
                self._join(hello, sock)

    def _problem(self, hello: Hello) -> str:
        me = self._me
        if hello.callee != me.name or hello.job != me.job:
            return f"this is {me.name} of {me.job}"
        if hello.generation != me.generation:
            return f"this is generation {me.generation}"
        if hello.callee_join != me.join:
            return f"this is part {me.join} of {me.name} in generation {me.generation}, not part {hello.callee_join}"
        return ""

    def _await_other(self, hello: Hello, handshake: PendingHandshake) -> None:
        """Keeps the first connection of a link for the second."""
        place = hello.caller, hello.link
        with self._lock:
            if place in self._halves:
                raise ValueError("a link with two connections of one direction")
            self._halves[place] = handshake
        try:
            send_hello(handshake.sock, HelloReply())
            handshake.joined.wait(HELLO_SECONDS)
        finally:
            with self._lock:
                left = self._halves.pop(place, None)
        if left:
            raise TimeoutError("the other connection of a link has not come in time")

    def _join(self, hello: Hello, sock: socket.socket) -> None:
        with self._lock:
            other = self._halves.pop((hello.caller, hello.link), None)
        if other is None:
            problem = "the other connection of this link was given up"
            send_hello(sock, HelloReply(problem))
            raise ConnectionError(problem)
        other.joined.set()
        try:
            send_hello(sock, HelloReply())
        except OSError:
            other.stop()
            raise
        for each in (sock, other.sock):
            each.settimeout(None)
        self._accepted(hello.caller, Sockets(outgoing=sock, incoming=other.sock, join=hello.join))


# ---- the end that calls


class Dialer:
    """Connects to peers, whose `addresses` become known when the generation meets; `find(peer, join)` returns that of
    one which has joined since, or raises PeerLostError. `rank0` is rank 0's name. Without `tls`, connections between
    machines are unencrypted; with `always_tls`, those of one machine are not made by Unix sockets."""

    def __init__(
        self,
        me: WorkerIdentity,
        tls: Tls | None,
        tunnel: Callable[[], TunnelClient] | None,
        *,
        rank0: str,
        always_tls: bool,
        seconds: float,
        session: Session,
    ) -> None:
        self._me, self._tls, self._tunnel = me, tls, tunnel
        self._rank0, self._always_tls, self._seconds = rank0, always_tls, seconds
        self.addresses: dict[str, Address] = {}
        self.find: Callable[[str, int], Address] = self._find_nobody
        self._machine, self._session = machine_id(), session

    def _find_nobody(self, peer: str, join: int) -> Address:
        raise PeerLostError(f"{peer} does not answer: it is no member of generation {self._me.generation}")

    def open(self, peer: str, join: int) -> Sockets:
        """Connects to `peer`, which is there as its part number `join` of the generation, or a later one: within
        CONNECT_TIMEOUT from when it knows the address. Raises PeerLostError."""
        address = self.addresses.get(peer)
        if address is None or address.join < join:
            address = self.addresses[peer] = self.find(peer, join)
        end = clock.now() + self._seconds
        return self._open(address, end)._replace(join=address.join)

    def _open(self, address: Address, end: float) -> Sockets:
        if address.path and address.machine == self._machine and not self._always_tls and Path(address.path).exists():
            with contextlib.suppress(OSError, ValueError):  # another container's, by the same name
                return self._open_unix(address)
        while True:
            until = time.monotonic() + end - clock.now()
            try:
                return self._open_pair(address, until) if self._tls else self._open_tcp(address, until)
            except (OSError, ValueError, PeerLostError) as error:
                if clock.now() + RETRY_SECONDS > end or self._session.ended:
                    place = f"{address.host}:{address.port}"
                    raise PeerLostError(f"{address.name} at {place} cannot be reached: {error}") from error
            time.sleep(RETRY_SECONDS)  # another process's port has no event for becoming open

    def _open_unix(self, address: Address) -> Sockets:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(HELLO_SECONDS)
            _widen(sock)
            sock.connect(address.path)
            if not same_user(sock):
                raise ConnectionError("another user's socket")
            reply = self._greet(sock, address, "both", secrets.token_hex(8), _probe())
            pid = _reads(sock, reply.probe)
            send_hello(sock, HelloReply(reads=bool(pid)))
            sock.settimeout(None)
            undo.pop_all()
        return Sockets(sock, sock, pid, reply.reads)

    def _open_tcp(self, address: Address, end: float) -> Sockets:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(connect((address.host, address.port), end))
            self._prepare(sock)
            self._greet(sock, address, "both", secrets.token_hex(8))
            sock.settimeout(None)
            undo.pop_all()
        return Sockets(sock, sock)

    def _open_pair(self, address: Address, end: float) -> Sockets:
        link = secrets.token_hex(8)
        with contextlib.ExitStack() as undo:
            outgoing = undo.enter_context(self._open_tls(address, "out", link, end))
            incoming = undo.enter_context(self._open_tls(address, "back", link, end))
            undo.pop_all()
        return Sockets(outgoing, incoming)

    def _open_tls(self, address: Address, direction: Direction, link: str, end: float) -> ssl.SSLSocket:
        assert self._tls is not None
        assert self._tunnel is not None
        service, left = places.wire(self._me.generation, address.join), max(0.1, end - time.monotonic())
        with contextlib.closing(self._tunnel()) as tunnel:
            ticket = tunnel.ticket(address.name, address.host, address.port, service, left)
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(connect((address.host, address.port), end))
            self._prepare(sock)
            sock.sendall(preamble(ticket))
            secured = undo.enter_context(self._tls.client(sock, address.name, address.name == self._rank0))
            self._greet(secured, address, direction, link)
            secured.settimeout(None)
            undo.pop_all()
        return secured

    def _prepare(self, sock: socket.socket) -> None:
        sock.settimeout(HELLO_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keepalive(sock, self._me.lease)

    def _greet(
        self, sock: socket.socket, callee: Address, direction: Direction, link: str, probe: Probe | None = None
    ) -> HelloReply:
        me = self._me
        hello = Hello(
            caller=me.name,
            callee=callee.name,
            job=me.job,
            generation=me.generation,
            join=me.join,
            callee_join=callee.join,
            link=link,
            direction=direction,
            probe=probe,
        )
        send_hello(sock, hello)
        reply = receive_hello(HelloReply, sock, time.monotonic() + HELLO_SECONDS)
        if reply.problem:
            raise ConnectionError(reply.problem)
        return reply
