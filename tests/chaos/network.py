"""A network of its own for each rank, so that one can be cut off: namespaces, joined by a bridge in another one.

The bridge does not stand in the host's namespace, where a firewall may be in its way (Docker's drops what a bridge
forwards); the tool reaches it through one more pair of interfaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

DEADLINE = 20.0


class NetworkError(Exception):
    """Namespaces cannot be had; the text says why."""


class Network:
    """Made by `start`, removed by `close`; names carry the pid, so that several can stand side by side."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._names = f"rolecall-{pid}"
        self._hub = f"{self._names}-hub"
        self._tool = f"rc{pid}"
        # of the range that is meant for tests of networks, and routed nowhere
        self._prefix = f"198.{18 + pid // 256 % 2}.{pid % 256}"
        self.own_address = f"{self._prefix}.254"  # of this process
        self._ranks: dict[str, int] = {}

    def start(self) -> None:
        """Make the bridge and this process's way to it. Raises NetworkError, and leaves nothing behind then."""
        if os.geteuid() != 0:
            raise NetworkError("not root")
        if shutil.which("ip") is None:
            raise NetworkError("no program ip (Debian: iproute2)")
        try:
            _ip("netns", "add", self._hub)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            _ip("link", "add", self._tool, "type", "veth", "peer", "name", "tool", "netns", self._hub)
            _ip("-n", self._hub, "link", "set", "tool", "master", "bridge", "up")
            _ip("addr", "add", f"{self.own_address}/24", "dev", self._tool)
            _ip("link", "set", self._tool, "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise NetworkError(_reason(error)) from error

    def add(self, name: str) -> tuple[str, list[str]]:
        """A rank's namespace: its address, and what a command is preceded by to run in it."""
        number = len(self._ranks) + 1
        self._ranks[name] = number
        space, port = f"{self._names}-{number}", f"port{number}"
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        address = f"{self._prefix}.{number}"
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        return address, ["ip", "netns", "exec", space]

    def cut(self, name: str) -> None:
        """Nothing gets to the rank or from it. The bridge's end of the pair is set down: the rank keeps its address and
        its routes, and what it sends is lost without a word, as behind a broken switch.
        """
        _ip("-n", self._hub, "link", "set", f"port{self._ranks[name]}", "down")

    def heal(self, name: str) -> None:
        _ip("-n", self._hub, "link", "set", f"port{self._ranks[name]}", "up")

    def close(self) -> None:
        """Remove everything. A namespace's interfaces go with it, once no process is left in it."""
        for space in [*(f"{self._names}-{number}" for number in self._ranks.values()), self._hub]:
            _ip_if_there("netns", "del", space)
        _ip_if_there("link", "del", self._tool)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE)


def _ip_if_there(*arguments: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _ip(*arguments)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"
    return str(error)
