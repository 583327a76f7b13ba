"""Ranks apart, as on machines of their own: each in a network namespace, with a folder for temporary files of its own,
so that they find no Unix socket of each other. Needs root and the program `ip`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.network import Network, NetworkError
from tests.integration.cluster import Rank

PORT, METRICS_PORT = 29400, 8000  # in a namespace
PRIVATE = ["sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$@"', "sh"]
PERIOD = 0.1  # of looking whether it is done
GONE_SECONDS = 10.0
QUEUE_SECONDS = 0.01  # of a link, and at least QUEUE_BYTES, four of the largest packets that a kernel hands over
QUEUE_BYTES = 2**18
BURST = "256kb"  # of the kernel's token bucket
Places = dict[str, tuple[str, list[str]]]  # by name: a namespace's address, and what a command in it is preceded by


@dataclass(frozen=True)
class Link:
    """A rank's link to all others: `bits_per_s` in each direction, without a delay. What it cannot take at once waits
    in a queue, one for each direction; what does not fit there is lost."""

    what: str
    bits_per_s: float


LINKS = {
    "1gbit": Link("1 Gbit/s", 1e9),
    "100mbit": Link("100 Mbit/s", 100e6),
    "20mbit": Link("20 Mbit/s", 20e6),
}


@contextlib.contextmanager
def network(names: Sequence[str], link: Link | None = None) -> Iterator[Places]:
    """A namespace for each name, with a `link`, if there is one to emulate. Raises NetworkError if there can be none;
    nothing is left of them afterwards.
    """
    network = _Linked()
    network.start()
    try:
        places = {name: network.add(name) for name in names}
        if link:
            network.shape(list(places.values()), link)
        yield places
    finally:
        network.close()


class _Linked(Network):
    """The tests' bridge, with a token bucket filter at both ends of each rank's pair of interfaces."""

    def shape(self, places: Sequence[tuple[str, list[str]]], link: Link) -> None:
        limit = max(QUEUE_BYTES, int(QUEUE_SECONDS * link.bits_per_s / 8))
        bucket = ["root", "tbf", "rate", f"{link.bits_per_s:.0f}bit", "burst", BURST, "limit", str(limit)]
        ends = [(prefix[-1], "eth0") for _, prefix in places]
        ends += [(self._hub, f"port{number}") for number in range(1, len(places) + 1)]
        for space, device in ends:
            words = ["tc", "-n", space, "qdisc", "add", "dev", device, *bucket]
            try:
                subprocess.run(words, check=True, capture_output=True, text=True, timeout=GONE_SECONDS)
            except subprocess.CalledProcessError as error:
                raise NetworkError(f"{' '.join(words)}: {error.stderr.strip()}") from error
            except (OSError, subprocess.SubprocessError) as error:
                raise NetworkError(str(error)) from error


def run(
    job: str, ranks: dict[str, tuple[str, int]], places: Places, deadline: float,
    on: Callable[[str], None] = lambda news: None, **settings: object,
) -> dict[str, Any]:  # fmt: skip
    """What rank 0 of `job` says in the end. `ranks` are role and ordinal by place, rank 0 first.

    Raises RuntimeError if a rank ends before, and TimeoutError. No process and no file is left afterwards.
    """
    started: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="bench-apart-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        (directory / "t").mkdir()  # a socket lies in it, whose path has to be short
        first = next(iter(ranks))
        shared = {
            **os.environ, **{key: str(value) for key, value in settings.items()},
            "JOB": job, "MASTER_ADDR": places[first][0], "MASTER_PORT": str(PORT), "PORT": str(PORT),
            "METRICS_PORT": str(METRICS_PORT), "BIND_ADDR": "", "JOB_TOKEN": secrets.token_urlsafe(), "SINKS": "none",
            "CHECKPOINT_DIR": str(directory / "run"), "TMPDIR": str(directory / "t"),
        }  # fmt: skip
        try:
            for place, (role, ordinal) in ranks.items():
                environment = {**shared, "ROLE": role, "ORDINAL": str(ordinal)}
                rank = Rank(role, ordinal, environment, directory / f"{role}-{ordinal}.log")
                rank.prefix = [*places[place][1], *PRIVATE]
                started.append(rank.start())
            return _done(directory / "run" / "DONE", started, deadline, on)
        finally:
            for rank in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                assert rank.process is not None
                rank.process.wait(GONE_SECONDS)


def _done(result: Path, ranks: list[Rank], deadline: float, on: Callable[[str], None]) -> dict[str, Any]:
    end = time.monotonic() + deadline
    while not result.exists():
        ended = [rank for rank in ranks if rank.process is not None and rank.process.poll() not in (None, 0)]
        if ended or time.monotonic() > end:
            said = "".join(f"{rank.name}: {rank.text()[-2000:]}" for rank in ended or ranks[:1])
            raise (RuntimeError if ended else TimeoutError)(f"not done within {deadline:g} s:\n{said}")
        on(f"{int(end - time.monotonic())} s left")
        time.sleep(PERIOD)
    found: dict[str, Any] = json.loads(result.read_text())
    return found
