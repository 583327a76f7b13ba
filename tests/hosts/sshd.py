"""Hosts for tests: an sshd in a network namespace each, and the configuration of ssh that reaches them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.network import Network
from tests.integration.cluster import ROOT

SSHD = "/usr/sbin/sshd"
PORT = 2222
DEADLINE = 20.0


def missing() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: iproute2, openssh-client, openssh-server)"
    return ""


class SshHosts:
    """As a context manager, hosts `names`; `environment` has a PATH on which `ssh` knows them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names
        self.network = Network()
        self.prefixes: dict[str, list[str]] = {}
        self.homes: dict[str, Path] = {}
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SshHosts:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for key in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, which a service would make
        self.network.start()
        known, config = [], [f"IdentityFile {self.folder / 'user'}", "IdentitiesOnly yes", f"Port {PORT}",
                             f"UserKnownHostsFile {self.folder / 'known'}", "GlobalKnownHostsFile /dev/null",
                             "StrictHostKeyChecking yes", "User root"]  # fmt: skip
        for name in self.names:
            address, self.prefixes[name] = self.network.add(name)
            config += [f"Host {name}", f"  HostName {address}"]
            known.append(f"[{address}]:{PORT} {(self.folder / 'host.pub').read_text().strip()}")
            self._serve(name, address)
        (self.folder / "known").write_text("\n".join(known) + "\n")
        (self.folder / "config").write_text("\n".join(config) + "\n")
        (self.folder / "bin").mkdir()
        script = self.folder / "bin" / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "config"} "$@"\n')
        script.chmod(0o755)

    def _serve(self, name: str, address: str) -> None:
        keys = self.folder / "authorized_keys"
        shutil.copy(self.folder / "user.pub", keys)
        keys.chmod(0o600)
        home = self.homes[name] = self.folder / f"home-{name}"
        (home / "tmp").mkdir(parents=True)
        config = self.folder / f"sshd-{name}"
        config.write_text(
            f"Port {PORT}\nListenAddress {address}\nHostKey {self.folder / 'host'}\nAuthorizedKeysFile {keys}\n"
            f"PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\n"
            # a home and a temporary folder for each host, as on machines of their own; what tests name is installed
            f"SetEnv HOME={home} TMPDIR={home / 'tmp'} PYTHONPATH={ROOT}\n"
            f'ForceCommand cd {home} && eval "$SSH_ORIGINAL_COMMAND"\n'
        )
        self._servers.append(subprocess.Popen([*self.prefixes[name], SSHD, "-D", "-e", "-f", str(config)],
                                              stderr=(self.folder / f"log-{name}").open("wb")))  # fmt: skip
        end = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, PORT), timeout=1):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"sshd of {name}: {(self.folder / f'log-{name}').read_text()}")
            time.sleep(0.02)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }

    def processes(self, name: str) -> list[str]:
        """The command lines of Rolecall's processes on a host."""
        space = self.prefixes[name][-1]
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout.split()
        lines = []
        for pid in pids:
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [line for line in lines if line and "sshd" not in line]

    def left(self, name: str) -> list[str]:
        """What is left in a host's temporary folder."""
        return sorted(path.name for path in (self.homes[name] / "tmp").iterdir())

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(DEADLINE)
        self.network.close()
