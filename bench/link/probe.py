"""What a link does, measured from inside the ranks' namespaces by programs of the standard library alone: `serve
ADDRESS PORT` until it is killed, and `measure ADDRESS PORT BITS_PER_S SECONDS DATAGRAMS`, which prints JSON.

The round trip is that of small datagrams, one after the other, on an idle link. The rate is that of a TCP connection's
data, which is less than the link's by the headers, at the receiver and without the first third of the time. The loss is
that of small datagrams, on their way there, at a low rate.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import threading
import time

PIECE = 2**18
SO_RCVBUFFORCE, ROOM = 33, 2**24  # asm-generic/socket.h
SILENCE = 2.0  # seconds after which a datagram is lost
DEADLINE = 60.0
ROUND_TRIPS = 11
DATAGRAM = bytes(200)
SHARE = 0.1  # of the rate, at which datagrams are sent
AT_ONCE = 10  # datagrams between two pauses
NUMBER = struct.Struct("!d")
COUNTED, ECHOED, ASKED = b"c", b"e", b"?"


def serve(address: str, port: int) -> None:
    """Receives one connection and any datagrams."""
    listener = socket.create_server((address, port))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)  # none is lost while this process waits for a core
    datagrams.bind((address, port))
    threading.Thread(target=_receive, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    counted = 0
    while True:
        data, sender = datagrams.recvfrom(2048)
        counted += data[:1] == COUNTED
        if data[:1] == ECHOED:
            datagrams.sendto(data, sender)
        elif data[:1] == ASKED:
            datagrams.sendto(NUMBER.pack(counted), sender)


def _receive(listener: socket.socket) -> None:
    """Sends the rate in bits/s back once the connection's data have ended."""
    connection, _ = listener.accept()
    connection.settimeout(DEADLINE)
    with connection:
        warm = time.perf_counter() + NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))[0] / 3
        buffer = bytearray(PIECE)
        begun, count, now = 0.0, 0, 0.0
        while size := connection.recv_into(buffer):
            now = time.perf_counter()
            if begun:
                count += size
            elif now > warm:
                begun = now
        connection.sendall(NUMBER.pack(8 * count / (now - begun) if count else 0.0))


def measure(address: str, port: int, bits_per_s: float, seconds: float, datagrams: int) -> dict[str, float]:
    """`round_trip_s` (median), `bits_per_s` and `loss` of a link that promises `bits_per_s`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        sock.settimeout(SILENCE)
        trips = [_ask(sock, ECHOED)[1] for _ in range(ROUND_TRIPS)]
        rate = _rate(address, port, seconds)
        pause = AT_ONCE * 8 * len(DATAGRAM) / (SHARE * bits_per_s)
        for number in range(datagrams):
            if number % AT_ONCE == 0:
                time.sleep(pause)  # the datagrams' rate
            sock.send(COUNTED + DATAGRAM)
        counted = NUMBER.unpack(_ask(sock, ASKED)[0])[0]
    return {"round_trip_s": statistics.median(trips), "bits_per_s": rate, "loss": 1 - counted / datagrams}


def _ask(sock: socket.socket, what: bytes) -> tuple[bytes, float]:
    """The answer to a datagram, and the seconds until it was there. A lost one is sent again."""
    ends = time.perf_counter() + DEADLINE
    while time.perf_counter() < ends:
        begun = time.perf_counter()
        sock.send(what)
        try:
            return sock.recv(2048), time.perf_counter() - begun
        except TimeoutError:
            continue
    raise TimeoutError(f"no answer within {DEADLINE:g} s")


def _rate(address: str, port: int, seconds: float) -> float:
    with socket.create_connection((address, port), timeout=DEADLINE) as connection:
        connection.sendall(NUMBER.pack(seconds))
        ends, piece = time.perf_counter() + seconds, bytes(PIECE)
        while time.perf_counter() < ends:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return float(NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))[0])


if __name__ == "__main__":
    os.nice(-20)  # what waits for a core counts bytes late
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        rate, seconds = float(sys.argv[4]), float(sys.argv[5])
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), rate, seconds, int(sys.argv[6]))))
