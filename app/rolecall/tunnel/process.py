"""The tunnel's process: one a rank, beside its supervisor and its worker; it ends with the supervisor.

It accepts TLS connections on PORT from the peers' tunnels to services that its own worker and supervisor announced, and
dials the peers' tunnels for its own rank. It outlives workers and runs no code of a job.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.messages.codec import decode, encode
from rolecall.messages.tunnel import Answer, Certificate, Destination, Figures, Place, Problem
from rolecall.tunnel import places
from rolecall.tunnel.acceptor import Acceptor
from rolecall.tunnel.channel import Channel
from rolecall.tunnel.dial import CONNECTED, REFUSED, StrangerError, dial
from rolecall.tunnel.keys import Credentials
from rolecall.tunnel.local import LOOPBACK, LocalListener, LocalServer
from rolecall.tunnel.loop import Loop
from rolecall.tunnel.relay import RESET, Relay, Rewrite
from rolecall.tunnel.tickets import Tickets

PULSE_SECONDS = 1.0  # between two checks of deadlines, and two reports of figures
MAX_DIALS = 32
MAX_CONTROL_DIALS = 2  # to the coordinator, which never waits behind peers that do not answer
MAX_PARKED = 4096  # connections that wait for a service to be announced
RENEWAL = "renewal"  # the reason label: a user's new certificates cannot be used
UNKNOWN_SERVICE = "service"  # the reason label: a member requests a service that is not announced
LOG_REPEAT_SECONDS = 30.0


class Listeners(NamedTuple):
    """The tunnel's listeners: PORT, its worker's requests, and connections to the coordinator."""

    outside: socket.socket
    inside: socket.socket
    control: socket.socket


class Tunnel:
    """Serves until the supervisor at the other end of `supervisor` has ended. `coordinator` is the path of this rank's
    coordinator, None at other ranks than rank 0; `rank0` is rank 0's member name."""

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        rank0: str,
        *,
        coordinator: Path | None,
        listeners: Listeners,
        supervisor: socket.socket,
    ) -> None:
        self._settings, self._credentials, self._rank0 = settings, credentials, rank0
        self._loop = loop = Loop()
        self._supervisor = supervisor
        # loopback ports; the coordinator's socket; the worker that takes a service's connections itself
        self._services: dict[str, int | Path | socket.socket] = {}
        self._tickets = Tickets()
        if coordinator:
            self._services[places.CONTROL] = coordinator
        self._parked: dict[str, list[tuple[float, Channel]]] = {}
        self._relays: set[Relay] = set()
        self._bytes = 0  # of closed connections
        self._refused: Counter[str] = Counter()
        self._reported = Figures()
        self._logged: dict[str, float] = {}
        self._dials, self._control_dials = _threads(MAX_DIALS), _threads(MAX_CONTROL_DIALS)
        self._done: deque[Callable[[], None]] = deque()
        self._wake, awake = socket.socketpair()
        self._wake.setblocking(False)
        awake.setblocking(False)
        self._awake = awake
        loop.watch(awake, select.EPOLLIN, lambda _: self._finish_dials())
        self._acceptor = Acceptor(
            listeners.outside,
            credentials,
            settings.lease_seconds,
            connected=self._member_connected,
            redeem=self._redeem,
            rejected=self._rejected,
        )
        LocalServer(
            loop,
            listeners.inside,
            self._announce,
            self._reach,
            ticket=self._fetch_ticket,
            certificate=self._certificate,
        )
        LocalListener(loop, listeners.control, self._reach_rank0)
        loop.watch(supervisor, select.EPOLLIN, self._receive_order)
        self._ended = False

    def serve(self) -> None:
        """Serves. Returns when the supervisor has ended."""
        acceptor, loop, pulse = self._acceptor, self._loop, 0.0
        watching = False
        while not self._ended:
            now = time.monotonic()
            if now >= pulse:
                self._pulse(now)
                pulse = now + PULSE_SECONDS
            rests = now < acceptor.rests_until
            if watching == rests:
                loop.watch(acceptor, 0 if rests else select.EPOLLIN, lambda _: acceptor.turn())
                watching = not rests
            loop.turn(max(0.0, min(acceptor.rests_until if rests else pulse, pulse) - now))

    # ---- connections from peers

    def _member_connected(self, channel: Channel, service: str) -> None:
        if service.removeprefix(places.TICKET) in self._services:
            self._accept_member(channel, service)
        elif service.startswith((places.STORE, places.TICKET)) and sum(map(len, self._parked.values())) < MAX_PARKED:
            # rank 0's worker is about to announce it
            self._parked.setdefault(service.removeprefix(places.TICKET), []).append(
                (time.monotonic() + self._settings.connect_timeout, channel)
            )
        else:
            self._decline(channel, f"{service[:64]} is not announced here")

    def _accept_member(self, channel: Channel, service: str) -> None:
        target = self._services[service.removeprefix(places.TICKET)]
        if isinstance(target, socket.socket):
            with contextlib.suppress(OSError):  # the peer has closed it
                channel.send_text(CONNECTED + self._tickets.issue(service.removeprefix(places.TICKET)))
            channel.close()
            return
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            try:
                plain = undo.enter_context(socket.socket(socket.AF_INET if isinstance(target, int) else socket.AF_UNIX))
                plain.setblocking(False)
                if isinstance(target, int):
                    with contextlib.suppress(BlockingIOError):  # the connection is being made
                        plain.connect((LOOPBACK, target))
                else:
                    plain.connect(str(target))
            except OSError as error:
                self._decline(channel, f"nothing serves {service[:64]} yet ({error.strerror})")
                return
            with contextlib.suppress(OSError):  # the peer has closed it
                channel.send_text(CONNECTED)
                undo.pop_all()
                self._relay(channel, plain)

    def _redeem(self, ticket: bytes, connection: socket.socket) -> bool:
        """Hands a connection with a ticket to the worker that it is for."""
        receiver = self._services.get(self._tickets.redeem(ticket))
        if not isinstance(receiver, socket.socket):
            return False
        try:
            socket.send_fds(receiver, [b"+"], [connection.fileno()])
        except OSError:  # the worker has ended, or takes none
            return False
        return True

    def _decline(self, channel: Channel, problem: str) -> None:
        self._refused[UNKNOWN_SERVICE] += 1
        with contextlib.suppress(OSError):
            channel.send_text(REFUSED + problem)
        channel.close()

    def _rejected(self, reason: str, address: str, problem: str) -> None:
        self._refused[reason] += 1
        if reason != "closed":
            count = self._refused[reason]
            self._log(reason, "connection rejected", reason=reason, address=address, problem=problem, rejections=count)

    # ---- requests of this rank

    def _announce(self, service: str, target: int | socket.socket | None) -> None:
        if target is None:
            self._services.pop(service, None)
            return
        self._services[service] = target
        for _, channel in self._parked.pop(service, ()):
            self._accept_member(channel, service)

    def _certificate(self) -> Certificate:
        return Certificate(self._credentials.authority, self._credentials.chain, self._credentials.given)

    def _fetch_ticket(self, peer: Destination, answer: Callable[[Answer], None]) -> None:
        def connected(channel: Channel) -> None:
            channel.close()
            answer(channel.answer)

        def failed(error: BaseException) -> None:
            self._log_unreachable(peer, error)
            answer(Problem(str(error) or type(error).__name__))

        self._dial(self._dials, peer._replace(service=places.TICKET + peer.service), connected, failed)

    def _reach(self, peer: Destination, port: int, plain: socket.socket) -> None:
        rewrite = None
        if peer.real:
            rewrite = Rewrite(f"{LOOPBACK}:{peer.real}".encode(), f"{LOOPBACK}:{port}".encode())

        def connected(channel: Channel) -> None:
            self._relay(channel, plain, rewrite)

        def failed(error: BaseException) -> None:
            self._log_unreachable(peer, error)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            plain.close()

        self._dial(self._dials, peer, connected, failed)

    def _reach_rank0(self, plain: socket.socket) -> None:
        def failed(error: BaseException) -> None:
            status = "401 Unauthorized" if isinstance(error, StrangerError) else "503 Service Unavailable"
            body = json.dumps({"reason": "tls", "text": str(error) or type(error).__name__}).encode()
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            with contextlib.suppress(OSError), plain:
                plain.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    plain.recv(2**16)  # unread data would reset the connection on close
                plain.send(head.encode() + body)

        s = self._settings
        rank0 = Destination(self._rank0, s.master_addr, s.rank0_port, places.CONTROL)
        self._dial(self._control_dials, rank0, lambda channel: self._relay(channel, plain), failed)

    def _dial(
        self,
        threads: ThreadPoolExecutor,
        peer: Destination,
        connected: Callable[[Channel], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        s = self._settings
        seconds = s.lease_seconds / 2 if peer.service == places.CONTROL else s.connect_timeout

        def done(future: Future[Channel]) -> None:
            def finish() -> None:
                error = future.exception()
                if error is None:
                    connected(future.result())
                else:
                    failed(error)

            self._done.append(finish)
            with contextlib.suppress(BlockingIOError):  # a wake-up is pending
                self._wake.send(b"\0")

        threads.submit(
            dial,
            self._credentials,
            peer,
            lease=s.lease_seconds,
            is_rank0=peer.name == self._rank0,
            seconds=seconds,
        ).add_done_callback(done)

    def _finish_dials(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)
        while self._done:
            self._done.popleft()()

    def _log_unreachable(self, peer: Destination, error: BaseException) -> None:
        level = "warning" if isinstance(error, StrangerError | ssl.SSLError) else "info"
        if isinstance(error, ConnectionRefusedError):
            level = "debug"  # its rank has ended, which the gang says
        place, problem = f"{peer.name} at {peer.host}:{peer.port}", str(error) or type(error).__name__
        self._log(place, "a peer's tunnel cannot be reached", level, peer=place, problem=problem)

    def _log(self, key: str, event: str, level: str = "warning", **details: Any) -> None:
        """Logs, for each `key` once in LOG_REPEAT_SECONDS. A full disk or a closed pipe must not end the tunnel."""
        now = time.monotonic()
        if now - self._logged.get(key, float("-inf")) > LOG_REPEAT_SECONDS:
            self._logged[key] = now
            with contextlib.suppress(OSError, ValueError):
                getattr(telemetry.log(), level)(event, **details)

    # ---- connections and the supervisor

    def _relay(self, channel: Channel, plain: socket.socket, rewrite: Rewrite | None = None) -> None:
        relay = Relay(self._loop, channel, plain, self._closed, rewrite)
        if not relay.over:
            self._relays.add(relay)

    def _closed(self, relay: Relay) -> None:
        self._bytes += relay.bytes
        self._relays.discard(relay)

    def _receive_order(self, _: int) -> None:
        try:
            message = self._supervisor.recv(4096)
        except OSError:
            message = b""
        if message:
            place: Place = decode(Place, message)
            self._credentials.place(place.name)
            self._renew()
        else:
            self._ended = True

    def _pulse(self, now: float) -> None:
        self._acceptor.expire()
        for service, parked in list(self._parked.items()):
            late = [channel for end, channel in parked if end < now]
            self._parked[service] = [(end, channel) for end, channel in parked if end >= now]
            for channel in late:
                self._decline(channel, f"{service[:64]} was not announced in time")
            if not self._parked[service]:
                del self._parked[service]
        self._renew()
        total = self._bytes + sum(relay.bytes for relay in self._relays)
        figures = Figures(len(self._relays), total, dict(self._refused))
        if figures != self._reported:
            self._reported = figures
            with contextlib.suppress(OSError):  # the supervisor ends, or is stopped
                self._supervisor.send(encode(figures), socket.MSG_DONTWAIT)

    def _renew(self) -> None:
        if problem := self._credentials.refresh():
            self._refused[RENEWAL] += 1
            self._log(RENEWAL, "new certificates cannot be used; the earlier ones stay in use", problem=problem)


def _threads(count: int) -> ThreadPoolExecutor:
    """A pool whose threads are started at once, so that a lack of threads ends the start and not a dial."""
    pool, all_there = ThreadPoolExecutor(count, "dial"), threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
