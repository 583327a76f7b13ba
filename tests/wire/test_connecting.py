"""How connections become links, and what becomes of those that do not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rolecall.errors import PeerLostError
from rolecall.messages.codec import encode
from rolecall.wire import codec, connecting
from rolecall.wire.connecting import LENGTH, Hello, HelloReply, receive_hello, send_hello
from rolecall.wire.frames import FrameReader, FrameWriter, Kind
from rolecall.wire.messages import Deadline, Request
from tests.tunnel.tunnels import dialled, received
from tests.wire.test_fuzz import Sent
from tests.wire.wires import DEADLINE, until
from tests.wire.workers import Worker


def call(caller: Worker, callee: str, method: str, *args: Any) -> Any:
    return caller.wire.call(callee, Request(method, args, {}, 0.0), Deadline(0.0)).result(DEADLINE)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_link(tmp_path: Path, kind: str) -> None:
    directory = tmp_path if kind == "unix" else None
    a, b = (Worker(name, directory) for name in ("a_0", "b_0"))
    a.knows(b)
    tensor = torch.rand(1_000_000)
    assert torch.equal(call(a, "b_0", "echo", tensor), tensor)
    (link,) = b.wire._links._accepted
    assert bool(link._sockets.pid) is (kind == "unix")
    if kind == "unix":
        assert (tmp_path / "b_0").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("other", [{"generation": 2}, {"job": "another"}])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_worker_of_another_generation_or_job_is_refused(tmp_path: Path, kind: str, other: dict[str, Any]) -> None:
    directory = tmp_path if kind == "unix" else None
    old, new = Worker("a_0", directory, seconds=0.2), Worker("b_0", directory, **other)
    old.knows(new)
    if kind == "unix":  # then it is tried by way of the port, which is nobody's
        old.dialer.addresses["b_0"] = new.address._replace(port=1)
    with pytest.raises(PeerLostError, match=r"b_0 at .* cannot be reached"):
        old.wire.connect("b_0", Deadline(DEADLINE))
    with pytest.raises(PeerLostError, match="is no member of generation 1"):
        old.wire.connect("c_0", Deadline(DEADLINE))
    assert not new.wire._links._accepted


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [({"name": "c_0"}, "this is b_0 of tested"), ({"join": 1}, "this is part 2 of b_0 in generation 1, not part 1")],
)
def test_another_member_or_part_at_the_address_is_not_taken_for_the_peer(wanted: dict[str, Any], answer: str) -> None:
    a, b = Worker("a_0", seconds=1), Worker("b_0", join=2)
    address = b.address._replace(**wanted)
    a.dialer.addresses[address.name] = address
    with pytest.raises(PeerLostError, match=answer):
        a.wire.connect(address.name, Deadline(DEADLINE))


HELLO = Hello("x_0", "b_0", "tested", 1, 0, 0, "link", "both")


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\0",
        b"\xff\xff" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(1) + b"\x90",
        *(
            LENGTH.pack(len(body)) + body
            for body in map(encode, (replace(HELLO, direction="out"), {"reads": True}, replace(HELLO, generation="1")))
        ),
    ],
)
def test_what_is_no_hello_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(connecting, "HELLO_SECONDS", 0.3)
    b = Worker("b_0")
    with dialled(b.address.port) as connection:
        connection.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            assert received(connection) == b""
    until(lambda: not b.acceptor._handshakes, "its end")
    assert not b.wire._links._accepted


def test_a_hello_that_comes_byte_by_byte_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "HELLO_SECONDS", 0.5)
    b, begun = Worker("b_0"), time.monotonic()
    with dialled(b.address.port) as connection, contextlib.suppress(ConnectionError):
        for byte in LENGTH.pack(4000) + b" " * 4000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)  # each within the time of one read
    assert time.monotonic() - begun < DEADLINE


def test_a_frame_right_behind_the_hello_is_not_lost(tmp_path: Path) -> None:
    """The maker of a Unix connection sends its last word and the first request without waiting."""
    b = Worker("b_0", tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(b.address.path)
        sock.settimeout(DEADLINE)
        send_hello(sock, HELLO)
        receive_hello(HelloReply, sock, time.monotonic() + DEADLINE)
        sent: Any = Sent()
        send_hello(sent, HelloReply())
        FrameWriter(sent).send(Kind.REQUEST, 1, codec.encode(tuple(Request("echo", (5,), {}, 0.0))))
        sock.sendall(sent.data)
        assert FrameReader(sock, 2**20).next().kind == Kind.ANSWER


def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "MAX_HANDSHAKES", 8)
    a, b, before = Worker("a_0"), Worker("b_0"), threading.active_count()
    a.knows(b)
    kept = [socket.create_connection(("127.0.0.1", b.address.port), DEADLINE) for _ in range(300)]
    until(lambda: len(b.acceptor._handshakes) == 8, "the bound")
    until(lambda: threading.active_count() - before <= 12, "their threads' end")
    assert call(a, "b_0", "echo", 1) == 1  # in place of the oldest
    for connection in kept:
        connection.close()
    until(lambda: not b.acceptor._handshakes, "their end")


def test_another_user_reaches_neither_the_socket_nor_the_memory(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    b = Worker("b_0", tmp_path)
    path = Path(b.address.path)
    for place in [path, *path.parents[:-1]]:
        place.chmod(0o777)  # so that only the peer's user is left to be looked at
    program = (
        "import os, socket, sys\n"
        "from rolecall.wire import memory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "region = memory.Region(int(sys.argv[2]), 8)\n"
        "try: memory.read(int(sys.argv[3]), region); print('read')\n"
        "except PermissionError as error: print('no memory')\n"
        "sock = socket.socket(socket.AF_UNIX); sock.settimeout(20)\n"
        "try:\n"
        "    sock.connect(sys.argv[1]); sock.sendall(b'\\0\\2{}'); print(sock.recv(100))\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    place = connecting._probe().address
    arguments = [b.address.path, str(place), str(os.getpid())]
    root = Path(__file__).resolve().parents[2]
    for mode, answers in ((0o777, ("b''", "ConnectionResetError", "BrokenPipeError")), (0o600, ("PermissionError",))):
        path.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=root, capture_output=True, text=True, check=True
        )
        words = done.stdout.split("\n")
        assert words[0] == "no memory"
        assert words[1] in answers
    assert not b.wire._links._accepted


def test_the_newest_part_of_a_member_calls_and_is_called(tmp_path: Path) -> None:
    b, old, new = Worker("b_0", tmp_path), Worker("a_0", tmp_path), Worker("a_0", tmp_path, join=1)
    for caller in (old, new):
        caller.knows(b)
    b.knows(old)
    assert call(old, "b_0", "echo", 1) == call(b, "a_0", "echo", 1) == 1
    assert call(new, "b_0", "echo", 2) == 2  # b learns of it by this call
    until(lambda: old.lost, "the end of the link of before")
    with pytest.raises(PeerLostError):
        call(old, "b_0", "echo", 3)
    assert not b.lost  # it is back
    b.dialer.find = lambda peer, join: new.address
    assert call(b, "a_0", "echo", 4) == 4
    b.wire.lose("c_0", "it was lost", 2)
    third = Worker("c_0", tmp_path, join=2)
    third.knows(b)
    with pytest.raises(PeerLostError):  # also if b has not heard of that part before
        call(third, "b_0", "echo", 4)
    b.wire.lose("a_0", "late", 0)
    assert call(b, "a_0", "echo", 5) == 5
    b.wire.lose("a_0", "the test says so", 1)
    with pytest.raises(PeerLostError, match="the test says so"):
        call(b, "a_0", "echo", 6)


def test_a_session_ends_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    a, b = Worker("a_0", tmp_path), Worker("b_0", tmp_path)
    a.knows(b)
    assert call(a, "b_0", "echo", 1) == 1
    waiting = a.wire.call("b_0", Request("wait", (), {}, 0.0), Deadline(0.0))
    assert b.member.entered.acquire(timeout=DEADLINE)
    a.session.end()
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        waiting.result(DEADLINE)
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        call(a, "b_0", "echo", 2)
    assert not a.lost
    assert not (tmp_path / "a_0").exists()
    closed = list[str]()
    a.session.on_end(lambda: closed.append("at once"))
    assert closed == ["at once"]
