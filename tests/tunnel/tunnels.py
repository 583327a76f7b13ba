"""Tunnels for tests, each in a process of its own as a rank has it, and what is sent through them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rolecall.tunnel.client import TunnelClient

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-more-than-128-bits"
DEADLINE = 30.0


class Tunnel:
    """The tunnel of the member `name`, of the job whose rank 0 is at `rank0_port`."""

    def __init__(self, name: str, port: int, rank0_port: int, **settings: str) -> None:
        self.name, self.port = name, port
        self.directory = Path(tempfile.mkdtemp(prefix="rolecall-tunnel-"))
        values = {
            "port": str(port),
            "master_port": str(rank0_port),
            "bind_addr": "127.0.0.1",
            "job_token": TOKEN,
            "connect_timeout": "5",
            "lease_seconds": "3",
        } | settings
        environment = {name.upper(): value for name, value in values.items() if value}
        self._log = (self.directory / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tunnel.tunnel_process", name, str(self.directory)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        pid = self._process.stdout.readline()
        assert pid, self.log()
        self.process = psutil.Process(int(pid))
        self.figures: dict[str, Any] = {"connections": 0, "bytes": 0, "refused": {}}
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.figures = json.loads(line)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def refused(self, reason: str) -> int:
        return int(self.figures["refused"].get(reason, 0))

    def reach(self) -> TunnelClient:
        """What its worker has."""
        return TunnelClient(self.directory, self.name, "127.0.0.1", self.port)

    def place(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()

    def kill_supervisor(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill_supervisor()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.wait(DEADLINE)
        self._log.close()


class Server:
    """Serves each connection to a loopback port with `serve`, in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._serve = serve
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(DEADLINE)
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._serve(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # its thread waits in accept
        self._listener.close()


def echo(connection: socket.socket) -> None:
    while data := connection.recv(2**16):
        connection.sendall(data)


def received(connection: socket.socket) -> bytes:
    """All that comes until the end."""
    data = b""
    while more := connection.recv(2**16):
        data += more
    return data


@contextlib.contextmanager
def dialled(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as connection:
        connection.settimeout(DEADLINE)
        yield connection


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)
