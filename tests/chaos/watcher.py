"""Records a rank's metrics for as long as it is watched: rank 0's steps, and every counter's growth."""

from __future__ import annotations

import http.client
import re
import threading
import time

from tests.chaos.ranks import ChaosRank
from tests.chaos.series import Sample, increase

QUICK, SLOW = 0.02, 0.2  # seconds between two scrapes: of rank 0, of the others
TIMEOUT = 0.5
COUNTERS = ("gang_restarts_total", "gang_generations_total", "gang_unreachable_total", "worker_restarts_total")
NOTICES = ("gang_restarts_total", "gang_unreachable_total", "worker_restarts_total")
LINE = re.compile(
    r"^rolecall_(generation|step|gang_members|recovery_seconds_count|" + "|".join(COUNTERS) + r")(?:\{(.*?)\})? (\S+)$",
    re.M,
)


class Watcher(threading.Thread):
    """Scrapes one rank. `samples` holds every change; `counters` is what each counter grew by in all, restarts of the
    rank included; `notices` are the times at which one of NOTICES grew.
    """

    def __init__(self, rank: ChaosRank, first: bool) -> None:
        super().__init__(daemon=True)
        self.rank, self.first = rank, first
        self.samples: list[Sample] = []
        self.counters: dict[tuple[str, str], float] = {}
        self.notices: list[tuple[float, str]] = []
        self._before: dict[tuple[str, str], float] = {}
        self._closing = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while not self._closing.wait(QUICK if self.first else SLOW):
            try:
                self._take(self._scrape())
            except (ConnectionError, http.client.HTTPException):
                # nobody listens: its supervisor is gone, and the next one counts from 0
                self._disconnect()
                self._before.clear()
                self._see(Sample(time.monotonic(), 0, None))
            except OSError:
                self._disconnect()  # no answer says nothing: it may be stopped, or cut off

    def _scrape(self) -> str:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.rank.address, self.rank.port, timeout=TIMEOUT)
        self._connection.request("GET", "/metrics")
        return self._connection.getresponse().read().decode()

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _take(self, text: str) -> None:
        now, generation, step, members, recoveries = time.monotonic(), 0, None, 0, 0
        for name, labels, value in LINE.findall(text):
            number = float(value)
            match name:
                case "generation":
                    generation = int(number)
                case "step":
                    step = int(number)
                case "gang_members":
                    members += int(number)
                case "recovery_seconds_count":
                    recoveries = int(number)
                case _:
                    self._count((name, labels), number, now)
        self._see(Sample(now, generation, step, members, recoveries))

    def _count(self, key: tuple[str, str], value: float, now: float) -> None:
        grown = increase(self._before.get(key), value)
        self._before[key] = value
        self.counters[key] = self.counters.get(key, 0.0) + grown
        if grown and key[0] in NOTICES:
            self.notices.append((now, f"{self.rank.name} {key[0]} {key[1]}".strip()))

    def _see(self, sample: Sample) -> None:
        if not self.samples or self.samples[-1][1:] != sample[1:]:
            self.samples.append(sample)

    def close(self) -> None:
        self._closing.set()
        if self.is_alive():
            self.join(5)
        self._disconnect()
