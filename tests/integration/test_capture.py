"""A whole run whose packets are recorded: with TLS=always, nothing that its ranks tell each other can be read."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rolecall.tunnel.tickets import MAGIC
from tests.integration.cluster import DEADLINE, QUICK, ROOT
from tests.integration.secretive import MARKER

FILE = ROOT / "tests" / "integration" / "secretive.py"
ALL_PROTOCOLS = 3  # ETH_P_ALL of linux/if_ether.h


class Capture:
    """All packets of the loopback interface, from the moment that it is made."""

    def __init__(self) -> None:
        try:
            self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        except OSError as error:
            pytest.skip(f"no packets without CAP_NET_RAW: {error}")
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
        self._sock.bind(("lo", 0))
        self.bytes, self.tickets, self.markers, self._over = 0, 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._record)
        self._thread.start()

    def _record(self) -> None:
        while not self._over.is_set():
            if select.select([self._sock], [], [], 0.2)[0]:
                packet = self._sock.recv(2**17)
                self.bytes += len(packet)
                self.tickets += MAGIC in packet
                self.markers += MARKER[:20] in packet

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._sock.close()


def test_no_packet_has_plain_text(tmp_path: Path) -> None:
    capture = Capture()
    environment = {**os.environ, **QUICK, "CHECKPOINT_DIR": str(tmp_path), "TLS": "always"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rolecall", "run", str(FILE), "--plain"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE,
            check=False,
        )
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
            sock.sendall(MARKER)  # which shows that it would have been seen
            server.accept()[0].recv(100)
            threading.Event().wait(0.5)
    finally:
        capture.end()
    assert done.returncode == 0, done.stdout + done.stderr
    assert capture.tickets >= 2 * 4  # two connections from each keeper to rank 0, and back
    assert capture.bytes > 100_000 * len(MARKER)  # of twelve times that; a busy machine misses packets
    assert 1 <= capture.markers <= 2
