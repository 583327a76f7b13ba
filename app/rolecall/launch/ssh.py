"""OpenSSH's client: the commands, and what its errors mean."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rolecall.config import __version__
from rolecall.launch.here import answer

CONNECT_SECONDS = 10  # for a host's sshd to answer
ALIVE_SECONDS, ALIVE_COUNT = 5, 3  # a cut connection ends after their product
COMMAND_SECONDS = 10.0  # for a command that needs no network
FAILED = 255  # the exit code of ssh's own errors
NO_PROGRAM = (126, 127)  # the shell's exit codes for a command that is not there, or cannot be run


def connect(host: str, socket: Path, command: Sequence[str]) -> list[str]:
    """Runs `command` on `host`, and lets `forward` use its connection by `socket`. It asks nothing, and ends if the
    host is silent."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ControlMaster": "yes",
        "ControlPath": _literal(socket),
        "ControlPersist": "no",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "LogLevel": "ERROR",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *words, "--", host, shlex.join(["exec", *command])]


def forward(host: str, socket: Path, local: int, remote: int) -> list[str]:
    """Has the connection of `connect` pass on a port of this machine's loopback to one of the host's."""
    ports = f"127.0.0.1:{local}:127.0.0.1:{remote}"
    options = ["-o", f"ControlPath={_literal(socket)}", "-o", "ClearAllForwardings=no"]
    return ["ssh", *options, "-O", "forward", "-L", ports, "--", host]


def run(host: str, socket: Path, command: Sequence[str]) -> list[str]:
    """Has the connection of `connect` run another `command` on `host`."""
    options = ["-o", f"ControlPath={_literal(socket)}", "-o", "ControlMaster=no", "-o", "BatchMode=yes"]
    return ["ssh", "-T", *options, "--", host, shlex.join(command)]


async def address(host: str) -> str:
    """The address that ssh's configuration has for `host`, without the user."""
    code, text = await answer(["ssh", "-G", "--", host], COMMAND_SECONDS)
    match = re.search(r"^hostname (\S+)$", text, re.MULTILINE)
    return match[1] if match and not code else host.rpartition("@")[2]


def problem(host: str, python: str, code: int, lines: Sequence[str]) -> str:
    """What is wrong, and what to do, if the command of `connect` has ended with `code` after it wrote `lines`."""
    text = "\n".join(lines)
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    if code == FAILED:
        if "IDENTIFICATION HAS CHANGED" in text:
            return f"{host}: its host key is another one than before; if that is right, run `ssh-keygen -R {host}`"
        if "Host key verification failed" in text:
            return f"{host}: its host key is not known here; run `ssh {host}` once, and compare the key's fingerprint"
        if "Permission denied" in text:
            return f"{host}: refuses the login ({last}); ssh must need no password: run `ssh-copy-id {host}`"
        return f"{host}: cannot be reached ({last}); check its name, the network, and that sshd runs there"
    if code in NO_PROGRAM:
        return f"{host}: has no Python at {python}; name the one that has Rolecall with --python PATH"
    if match := re.search(r"No module named '?rolecall(\.?)", text):
        if match[1]:
            return f"{host}: {python} has another version of Rolecall; install {__version__} there, as here"
        return (
            f"{host}: {python} has no Rolecall; install {__version__} there, or name another Python with --python PATH"
        )
    return f"{host}: Rolecall does not start with {python} (exit code {code}: {last}); try `ssh {host} {python} -V`"


def _literal(path: Path) -> str:
    return str(path).replace("%", "%%")
