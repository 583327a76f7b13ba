"""Runs of `calls_job`, whose ranks are on one machine or apart: each in a network namespace, with a folder for
temporary files of its own, so that they find no Unix socket of each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import launch
from bench.calls_job import Calls
from rolecall.fields import variables
from tests.chaos.network import Network
from tests.integration.cluster import Rank

JOB = "bench.calls_job"
FIXED = {"SINKS": "none", "CHECKPOINT_INTERVAL": 86400, "LOG_INTERVAL": 1, "JOIN_GRACE": 60, "STUCK_SECONDS": 3600}
PORT, METRICS_PORT = 29400, 8000  # in a namespace
PRIVATE = ["sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$@"', "sh"]
PERIOD = 0.1  # of looking whether it is done
GONE_SECONDS = 10.0


@contextlib.contextmanager
def network() -> Iterator[dict[str, tuple[str, list[str]]]]:
    """Namespaces for a callee and a caller: each one's address, and what a command is preceded by to run in it. Raises
    NetworkError.
    """
    made = Network()
    made.start()
    try:
        yield {name: made.add(name) for name in ("caller", "callee")}
    finally:
        made.close()


def here(deadline: float, **settings: object) -> dict[str, float]:
    """What rank 0 says in the end, by `rolecall run`. Raises RuntimeError."""
    with launch.run(JOB, deadline, {**FIXED, **settings}) as running:
        for _ in running.events():
            pass
        return running.done()


def apart(places: dict[str, tuple[str, list[str]]], deadline: float, **settings: object) -> dict[str, float]:
    """What rank 0 says in the end, with the two ranks in `places`. Raises RuntimeError and TimeoutError."""
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="bench-calls-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "t").mkdir()
        known = {name for name, *_ in variables(Calls)}
        shared = {
            **{key: value for key, value in os.environ.items() if key not in known},
            **{key: str(value) for key, value in {**FIXED, **settings}.items()},
            "JOB": JOB, "MASTER_ADDR": places["caller"][0], "MASTER_PORT": str(PORT), "PORT": str(PORT),
            "METRICS_PORT": str(METRICS_PORT), "BIND_ADDR": "", "JOB_TOKEN": secrets.token_urlsafe(),
            "CHECKPOINT_DIR": str(directory / "run"), "TMPDIR": str(directory / "t"), "ORDINAL": "0",
        }  # fmt: skip
        try:
            for role, place in (("lead", "caller"), ("member", "callee")):
                prefix = [*places[place][1], *PRIVATE]
                ranks.append(Rank(role, 0, {**shared, "ROLE": role}, directory / f"{role}.log", prefix=prefix).start())
            return _done(directory, ranks, time.monotonic() + deadline)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.process.wait(GONE_SECONDS)  # type: ignore[union-attr]


def _done(directory: Path, ranks: list[Rank], end: float) -> dict[str, Any]:
    result = directory / "run" / "DONE"
    while not result.exists():
        ended = [rank for rank in ranks if rank.process is not None and rank.process.poll() is not None]
        if ended or time.monotonic() > end:
            said = "".join(rank.text()[-2000:] for rank in ended or ranks)
            raise (RuntimeError if ended else TimeoutError)(f"{JOB} in namespaces is not done:\n{said}")
        time.sleep(PERIOD)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


if __name__ == "__main__":
    with network() as both:
        print(apart(both, 120, **dict(word.split("=") for word in sys.argv[1:])))
