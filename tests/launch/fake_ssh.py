"""`ssh` for tests: runs the command on this machine, in the folder $FAKE_SSH/HOST, which is the host's home.

Forwards ports as OpenSSH's client does, by the socket of ControlPath. Some hosts have a fault, by their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

FAULTS = {
    "gone": "ssh: connect to host gone port 22: Connection refused",
    "stranger": "No ED25519 host key is known for stranger.\nHost key verification failed.",
    "changed": "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
    "closed": "me@closed: Permission denied (publickey).",
}
FAULTY = {  # what a host runs in place of the command
    "old": """echo '{"kind": "ready", "version": "0.0.1", "port": 29400, "metrics_port": 20000}'; cat >/dev/null""",
    "bare": 'echo "$0: No module named rolecall" >&2; exit 1',
    "pythonless": "exec /no/such/python",
}
OTHER_VERSIONS = {"patched": ("3.11.9", "2.13.1+cu130"), "newer": ("3.12.1", "2.13.0")}  # of Python and torch
VERSION = "0.0.2"  # of Rolecall there
READY = (
    """echo '{"kind": "ready", "version": "%s", "port": 29400, "metrics_port": 20000, "python": "%s", "torch": "%s"}'"""
)
COMMANDS = FAULTY | {
    name: f"{READY % (VERSION, *versions)}; cat >/dev/null" for name, versions in OTHER_VERSIONS.items()
}


def install(folder: Path) -> dict[str, str]:
    """The environment in which `ssh` is this."""
    script = folder / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__)} "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{os.environ['PATH']}", "FAKE_SSH": str(folder)}


def main(words: Sequence[str]) -> int:
    host, command = words[words.index("--") + 1 :][:1][0], words[words.index("--") + 2 :]
    if "-G" in words:
        print(f"user me\nhostname {host}.example")
        return 0
    control = next(word.partition("=")[2] for word in words if word.startswith("ControlPath="))
    if "-O" in words:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(control)
            client.sendall(words[words.index("-L") + 1].encode())
            return int(client.recv(1) != b"y")
    if host in FAULTS:
        print(FAULTS[host], file=sys.stderr)
        return 255
    home = Path(os.environ["FAKE_SSH"]) / host
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(control)
        listener.listen()
        threading.Thread(target=_forward_forever, args=(listener,), daemon=True).start()
        print("Welcome", flush=True)  # by the login shell
        # none of this machine's variables, as with OpenSSH
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home / "tmp")}
        ran = ["sh", "-c", COMMANDS.get(host, " ".join(command))]
        code = subprocess.run(ran, cwd=home, env=environment).returncode
    Path(control).unlink(missing_ok=True)
    return code if code >= 0 else 255


def _forward_forever(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        local, _, remote = client.recv(1000).decode().partition(":127.0.0.1:")
        server = socket.create_server(("127.0.0.1", int(local.rpartition(":")[2])))
        threading.Thread(target=_serve_forever, args=(server, int(remote)), daemon=True).start()
        client.sendall(b"y")
        client.close()


def _serve_forever(server: socket.socket, remote: int) -> None:
    while True:
        client, _ = server.accept()
        try:
            there = socket.create_connection(("127.0.0.1", remote))
        except OSError:
            client.close()
            continue
        for source, sink in ((client, there), (there, client)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        shutil.copyfileobj(source.makefile("rb", 0), sink.makefile("wb", 0))
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
