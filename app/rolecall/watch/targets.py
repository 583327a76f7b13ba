"""What the TARGETs of `python -m rolecall watch` stand for: where ranks serve their metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from rolecall.config import Settings, UsageError
from rolecall.run import rundir

PORT: int = Settings.model_fields["metrics_port"].default
RANKS = Path("logs") / "ranks.json"  # in the folder of a local run, while it runs
LOOK_UP = 5.0  # deadline of a name's look-up, in seconds


@dataclass(frozen=True)
class Address:
    """Where a rank's metrics are, and what it is called until it has said who it is."""

    name: str
    url: str


class Source(Protocol):
    """What one TARGET stands for."""

    async def addresses(self) -> list[Address]:
        """Its ranks, as they are now; empty where that cannot be told."""
        ...


@dataclass(frozen=True)
class Server:
    """A host and port. A name of several addresses stands for a rank at each of them."""

    scheme: str
    host: str
    port: int
    path: str

    def at(self, host: str) -> Address:
        place = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        return Address(place, f"{self.scheme}://{place}{self.path}")

    async def addresses(self) -> list[Address]:
        if self.scheme == "https" or _is_address(self.host):
            return [self.at(self.host)]  # a certificate is of the name
        with contextlib.suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(LOOK_UP):
                found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            for family in (socket.AF_INET, socket.AF_INET6):  # one of them: localhost has both, and is one rank
                hosts = sorted({str(address[0]) for kind, _, _, _, address in found if kind == family})
                if len(hosts) > 1:
                    return [self.at(host) for host in hosts]
                if hosts:
                    break
        return [self.at(self.host)]


@dataclass(frozen=True)
class Folder:
    """The folder of a run of `local`, which says in a file there where its ranks are."""

    path: Path

    async def addresses(self) -> list[Address]:
        return ranks_of(self.path)


def parse(text: str) -> Source:
    """What TARGET says: a folder, a port, host:port, host, or a URL. Raises UsageError where it is none of these."""
    problem = f"TARGET {text!r}: is no folder of a local run, port, host:port or URL"
    if text and Path(text).is_dir() and not text.isdecimal():
        return Folder(Path(text))
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    scheme, divider, _ = text.partition("://")
    if divider and scheme not in ("http", "https"):
        raise UsageError(problem)
    if not divider and ("/" in text or not re.fullmatch(r"[\w:\[][\w.:\[\]%-]*", text)):
        raise UsageError(f"TARGET {text!r}: there is no such folder" if "/" in text else problem)
    try:
        if not divider and text.count(":") > 1 and "[" not in text:
            text = f"[{ipaddress.ip_address(text)}]"
        parts = urlsplit(text if divider else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(problem) from None
    if not host or port == 0:
        raise UsageError(problem)
    standard = {"http": 80, "https": 443}[parts.scheme] if divider else PORT
    path = parts.path if parts.path.strip("/") else "/metrics"
    return Server(parts.scheme, host, port or standard, path + (f"?{parts.query}" if parts.query else ""))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# ---- local runs


def tell(directory: Path, addresses: list[Address]) -> bool:
    """Write where the ranks of the local run in `directory` are, for as long as this process lives; False where
    another one runs there. Raises OSError."""
    if ranks_of(directory):
        return False
    me = {"pid": os.getpid(), "created": psutil.Process().create_time(), "ranks": [asdict(one) for one in addresses]}
    rundir.write_atomically(directory / RANKS, json.dumps(me, indent=1).encode() + b"\n")
    return True


def ranks_of(directory: Path) -> list[Address]:
    """The ranks of the local run in `directory`; none where it has ended, in whatever way."""
    try:
        read = json.loads((directory / RANKS).read_text())
        if psutil.Process(read["pid"]).create_time() != read["created"]:
            return []  # another process has its number by now
        return [Address(str(one["name"]), str(one["url"])) for one in read["ranks"]]
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return []


def end_of(directory: Path) -> str:
    """How the local run in `directory` ended, as rank 0's summary says."""
    try:
        return str(json.loads((directory / rundir.SUMMARY).read_text())["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return "stopped"
