"""A training of `ps` whose ranks may each live in a network namespace: started, followed by rank 0's log, and gone
afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.link.network import Links, traffic
from rolecall.fields import variables
from rolecall.jobs.ps import PsSettings
from rolecall.launch.here import free_ports
from rolecall.rank.zygote import Zygote
from tests.integration.cluster import Rank

PORT, METRICS_PORT = 29400, 8000  # in a namespace
PERIOD = 0.02  # of looking at the log
GONE_SECONDS = 10.0
SCRAPE_SECONDS = 5.0
START_SECONDS = 180.0  # until rank 0 trains
UPDATE = re.compile(r"Epoch (\d+)\tstep (\d+)\tloss")
TESTED = re.compile(r"Epoch (\d+)\ttest accuracy ([\d.]+)%")
FIXED = {
    "LOG_FORMAT": "json", "SINKS": "none", "CHECKPOINT_INTERVAL": 86400, "JOIN_GRACE": 120, "THREADS": 1,
    # what is measured is a slow link, not how soon it is taken for a lost one
    "STEP_TIMEOUT": 900, "RPC_TIMEOUT": 120, "CONNECT_TIMEOUT": 120, "LEASE_SECONDS": 30, "STUCK_SECONDS": 3600,
    "ON_FINISH": "linger",  # metrics are read after the end
}  # fmt: skip


def names(trainers: int) -> list[str]:
    """The ranks: one server, `trainers` trainers."""
    return ["ps-0", *(f"trainer-{number}" for number in range(trainers))]


@dataclass(frozen=True)
class Traffic:
    """A trainer's bytes: the tensors in calls and answers, and, in a namespace, all that its interface has passed."""

    sent: float
    received: float
    wire_sent: float
    wire_received: float


class Training:
    """A run under way; made by `train`."""

    def __init__(self, directory: Path, ranks: Sequence[Rank], addresses: Sequence[str], links: Links | None) -> None:
        self.directory, self.ranks, self._addresses, self._links = directory, ranks, addresses, links
        self._read = 0  # bytes of rank 0's log
        self._generations = 0

    def events(self, deadline: float) -> Iterator[dict[str, Any]]:
        """The lines of rank 0's log, until the job has finished or it is `deadline` (of the monotonic clock).

        Raises RuntimeError where a rank fails or is lost.
        """
        while time.monotonic() < deadline:
            over = self.finished  # before the last look
            for event in self._new():
                if event.get("event") == "gang generation":
                    self._generations += 1
                if self._generations > 1 or event.get("event") == "gang failed":
                    raise RuntimeError(f"ranks were lost: {event}")
                yield event
            if over:
                return
            for rank in self.ranks:
                assert rank.process is not None
                if (code := rank.process.poll()) is not None:
                    raise RuntimeError(f"{rank.name} ended with exit code {code}: {_last(rank.text())}")
            time.sleep(PERIOD)

    def _new(self) -> Iterator[dict[str, Any]]:
        log = self.ranks[0].log
        content = log.read_bytes()[self._read :] if log.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # not one of Rolecall's own lines
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    @property
    def finished(self) -> bool:
        return (self.directory / "checkpoints" / "DONE").exists()

    def done(self) -> dict[str, Any]:
        """What the job says in DONE."""
        result: dict[str, Any] = json.loads((self.directory / "checkpoints" / "DONE").read_text())
        return result

    def samples(self) -> float:
        """Training samples that updates have used so far."""
        return self._metrics(0).get(("rolecall_done_total", ""), 0.0)

    def traffic(self) -> list[Traffic]:
        """Of every trainer so far."""
        counted = []
        for place, rank in enumerate(self.ranks):
            if rank.role == "trainer":
                values = self._metrics(place)
                sent, received = (
                    sum(value for (name, _), value in values.items() if name == f"rolecall_rpc_{way}_bytes_total")
                    for way in ("sent", "received")
                )
                wire = traffic(self._links, rank.name) if self._links else (0, 0)
                counted.append(Traffic(sent, received, *wire))
        return counted

    def _metrics(self, place: int) -> dict[tuple[str, str], float]:
        """Samples by name and method. Raises RuntimeError where the rank does not answer."""
        rank = self.ranks[place]
        url = f"http://{self._addresses[place]}:{rank.environment['METRICS_PORT']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as answer:
                text = answer.read().decode()
        except OSError as error:
            raise RuntimeError(f"the metrics of {rank.name} cannot be read ({error})") from error
        return {
            (sample.name, sample.labels.get("method", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextlib.contextmanager
def train(
    settings: Mapping[str, object], trainers: int, links: Links | None = None, zygote: Zygote | None = None
) -> Iterator[Training]:
    """Starts one server and `trainers` trainers with `settings`: in the namespaces of `links`, or on loopback as forks
    of `zygote`. No process and no file is left afterwards.
    """
    directory = Path(tempfile.mkdtemp(prefix="bench-wan-"))
    ranks: list[Rank] = []
    try:
        (directory / "t").mkdir()  # a socket lies in it, whose path has to be short
        addresses = [links.address(name) if links else "127.0.0.1" for name in names(trainers)]
        ports = free_ports(2 * len(addresses)) if not links else []
        known = {name for name, *_ in variables(PsSettings)}
        shared = {
            **{key: value for key, value in os.environ.items() if key not in known},
            **{key: str(value) for key, value in {**FIXED, **settings}.items()},
            "JOB": "ps", "TRAINERS": str(trainers), "MASTER_ADDR": addresses[0], "JOB_TOKEN": secrets.token_urlsafe(),
            "MASTER_PORT": str(ports[0] if ports else PORT), "CHECKPOINT_DIR": str(directory / "checkpoints"),
            "BIND_ADDR": "" if links else "127.0.0.1", "TMPDIR": str(directory / "t"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        for place, name in enumerate(names(trainers)):
            role, _, ordinal = name.partition("-")
            port, metrics = (ports[2 * place], ports[2 * place + 1]) if ports else (PORT, METRICS_PORT)
            one = {"ROLE": role, "ORDINAL": ordinal, "PORT": str(port), "METRICS_PORT": str(metrics)}
            rank = Rank(role, int(ordinal), {**shared, **one}, directory / f"{name}.log",
                        prefix=links.prefix(name) if links else [])  # fmt: skip
            rank.server = zygote
            ranks.append(rank.start())
        yield Training(directory, ranks, addresses, links)
    finally:
        for rank in ranks:
            assert rank.process is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.process.wait(GONE_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def stamp(event: Mapping[str, Any]) -> float:
    """When the line was logged, in seconds."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _last(text: str) -> str:
    """The line that says why a rank has ended."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("rolecall: ")]
    return (errors or lines or ["it has said nothing"])[-1][:300]
