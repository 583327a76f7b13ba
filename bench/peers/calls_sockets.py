"""Bytes by a plain socket, without calls: the limit. The answer overwrites what was sent."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from bench import calls_work
from bench.peers import calls

HEAD = 8  # bytes of a size
SIZES = {*calls_work.SIZES.values(), *calls_work.SMALL.values()}


def read(sock: socket.socket, view: memoryview) -> None:
    while view:
        arrived = sock.recv_into(view)
        if not arrived:
            raise EOFError
        view = view[arrived:]


def serve(sock: socket.socket) -> None:
    head, buffers = bytearray(HEAD), {size: memoryview(bytearray(size)) for size in SIZES}
    while True:
        read(sock, memoryview(head))
        buffer = buffers[int.from_bytes(head)]
        read(sock, buffer)
        sock.sendall(buffer)


def main() -> None:
    chosen = calls.options(__doc__)
    if chosen.listen:
        with socket.create_server((chosen.address, chosen.port)) as listener:
            calls.ready()
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(sock)
    sock = socket.create_connection((chosen.address, chosen.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(payload: Any) -> Callable[[], Any]:
        raw = memoryview(payload).cast("B")
        sock.sendall(raw.nbytes.to_bytes(HEAD))
        sock.sendall(raw)
        target = memoryview(bytearray(payload)) if raw.readonly else raw

        def wait() -> Any:
            read(sock, target)
            return payload

        return wait

    calls.measure(chosen, send)


if __name__ == "__main__":
    main()
