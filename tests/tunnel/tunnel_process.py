"""A process with a tunnel, for tests: a supervisor as far as the tunnel sees it. It imports no torch: that is slow."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.tunnel import keys
from rolecall.tunnel.handle import Handle

JOB, RANK_0 = "tested", "lead_0"


def main() -> None:
    """Prints the tunnel's figures, and obeys what it reads."""
    name, directory = sys.argv[1:]
    settings = Settings(job=JOB)
    keys.RELOAD = 0.2  # no test waits for longer
    telemetry.setup_logging("text", "debug", stream=sys.stderr)
    handle = Handle(settings, JOB, name.replace("-", ""), RANK_0, Path(directory))
    print(handle.pid, flush=True)

    def obey() -> None:
        for line in sys.stdin:
            handle.place(line.strip())

    threading.Thread(target=obey, daemon=True).start()
    with contextlib.suppress(OSError):
        while message := handle._socket.recv(4096):
            print(message.decode(), flush=True)


if __name__ == "__main__":
    main()
