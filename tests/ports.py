"""TCP ports for tests."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from rolecall.errors import UsageError
from rolecall.launch import here
from rolecall.placement import FIRST_PORT

PORTS = range(10_000, FIRST_PORT)  # below those of placed ranks and those that runs choose
WORKERS = 8  # of pytest, at most
# A port is not listened on all the time that it is somebody's: so each test process has its own share, of pairs, since
# rank 0 with TLS=off takes the next port too.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
_share = deque(PORTS[2 * _worker :: 2 * WORKERS])


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1, each free as the next one is. A port is given again when all others were."""
    found: list[int] = []
    for _ in range(len(_share)):
        port = _share[0]
        _share.rotate(-1)
        with contextlib.suppress(UsageError):
            for held in here.reserve(2, [port, port + 1]):
                held.close()
            found.append(port)
        if len(found) == count:
            return found
    raise UsageError(f"no {count} free pairs of ports")
