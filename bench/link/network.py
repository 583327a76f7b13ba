"""Network namespaces for ranks, joined by links."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

from bench.link import router
from bench.link.links import Link
from tests.chaos.network import Network, NetworkError

DEADLINE = 20.0  # of one command
# as most of Linux's machines have it, whatever this one's default is
CONGESTION = "cubic"
BURST = "256kb"  # of the kernel's token bucket


class Links(Protocol):
    """The ranks' namespaces, while they stand."""

    def address(self, name: str) -> str:
        """The rank's address, for all others and for this machine."""
        ...

    def prefix(self, name: str) -> list[str]:
        """What a command is preceded by to run in the rank's namespace."""
        ...


@contextlib.contextmanager
def linked(link: Link, names: Sequence[str], *, in_kernel: bool = False) -> Iterator[Links]:
    """A namespace for each of the ranks `names`, with a `link` each. This machine reaches them past the links. With
    `in_kernel`, the kernel shapes a slow link too: that costs the processors less, and there is no delay.

    Raises NetworkError where they cannot be had. Nothing is left of them afterwards.
    """
    if in_kernel or link.in_kernel:
        shaped = _Filtered(link)
        shaped.start()
        try:
            shaped.shape(names)
            yield shaped
        finally:
            shaped.close()
    else:
        routed = _Routed(link)
        try:
            routed.start(names)
            yield routed
        finally:
            routed.close()


def traffic(links: Links, name: str) -> tuple[int, int]:
    """Bytes that the rank has sent and received, headers included."""
    space = links.prefix(name)[-1]
    shown = _ip("-n", space, "-json", "-statistics", "link", "show", "dev", "eth0")
    counts = json.loads(shown)[0]["stats64"]
    return int(counts["tx"]["bytes"]), int(counts["rx"]["bytes"])


class _Filtered(Network):
    """The tests' bridge, with a token bucket filter at both ends of each rank's pair of interfaces."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._places: dict[str, tuple[str, list[str]]] = {}

    def shape(self, names: Sequence[str]) -> None:
        bucket = ["root", "tbf", "rate", f"{self._link.bits_per_s:.0f}bit", "burst", BURST,
                  "limit", str(self._link.queue_bytes)]  # fmt: skip
        try:
            for number, name in enumerate(names, 1):
                self._places[name] = self.add(name)
                space = self.prefix(name)[-1]
                _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", *bucket)
                _run("tc", "-n", self._hub, "qdisc", "add", "dev", f"port{number}", *bucket)
                _set_congestion(space, f"{self._prefix}.0/24")
        except (OSError, subprocess.SubprocessError) as error:
            raise NetworkError(_reason(error)) from error

    def address(self, name: str) -> str:
        return self._places[name][0]

    def prefix(self, name: str) -> list[str]:
        return self._places[name][1]


class _Routed:
    """TUN devices, with the router between them."""

    def __init__(self, link: Link) -> None:
        pid = os.getpid()
        self._link, self._names = link, f"rolecall-link-{pid}"
        self._device = f"rl{pid}"
        # of the range that is meant for tests of networks, and routed nowhere
        self._prefix = f"198.{18 + pid // 256 % 2}.{pid % 256}"
        self._numbers: dict[str, int] = {}
        self._router: subprocess.Popen[bytes] | None = None

    def start(self, names: Sequence[str]) -> None:
        if os.geteuid() != 0:
            raise NetworkError("not root")
        if shutil.which("ip") is None:
            raise NetworkError("no program ip (Debian: iproute2)")
        descriptors: list[int] = []
        # a loss is one of single packets
        offload = not self._link.loss
        try:
            descriptors.append(router.open_tun(self._device, offload))
            _ip("addr", "add", f"{self._prefix}.254/24", "dev", self._device)
            _ip("link", "set", self._device, "up")
            for number, name in enumerate(names, 1):
                space, device = f"{self._names}-{number}", f"{self._device}-{number}"
                _ip("netns", "add", space)
                self._numbers[name] = number
                descriptors.append(router.open_tun(device, offload))
                _ip("link", "set", device, "netns", space, "name", "eth0")
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "txqueuelen", "5000", "up")
                _set_congestion(space, f"{self._prefix}.0/24")
            ranks = [(descriptor, self.address(name)) for descriptor, name in zip(descriptors[1:], names, strict=True)]
            self._router = router.start(self._link.name, descriptors[0], ranks)
        except (OSError, subprocess.SubprocessError) as error:
            raise NetworkError(_reason(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def address(self, name: str) -> str:
        return f"{self._prefix}.{self._numbers[name]}"

    def prefix(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self._names}-{self._numbers[name]}"]

    def close(self) -> None:
        if self._router:
            router.end(self._router)  # and the devices with it
        for number in self._numbers.values():
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", f"{self._names}-{number}")


def _set_congestion(space: str, network: str) -> None:
    """A kernel that does not know it keeps its default."""
    with contextlib.suppress(subprocess.SubprocessError):
        _ip("-n", space, "route", "change", network, "dev", "eth0", "congctl", CONGESTION)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"
    return str(error)
