"""Runs of the `ps` job, started as a user starts them."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import launch
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.model import build, parts
from rolecall.observe import targets

EPOCH = re.compile(r"Epoch (\d+)\tstep (\d+)\tloss")
SAMPLES = 1438  # digits to train with
WARM, AFTER = 3, 2  # epochs before the measured ones, and behind them
JOIN_GRACE = 120  # seconds: on a busy machine too it starts with all trainers
SCRAPE_SECONDS = 1.0  # of one trainer; the epochs behind the measured ones last longer


@dataclass(frozen=True)
class Accuracy:
    """`accuracy` is the share of the test data classified right at the end; `seconds` are those of training."""

    accuracy: float
    updates: int
    samples: int
    seconds: float


@dataclass(frozen=True)
class Throughput:
    """Of the epochs in the middle of a run: samples and seconds, and per trainer what a step cost on the average:
    payload bytes sent and received in `exchange`, and seconds that it stood still for parameters. `cpu_seconds` are
    those of all processes.
    """

    samples: int
    seconds: float
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    wait_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second over all trainers."""
        return self.samples / self.seconds


def accuracy(trainers: int, progress: Callable[[str], None], deadline: float = 300.0, **variables: object) -> Accuracy:
    """Train to the end at the default settings, but for `variables`.

    Raises RuntimeError where the run fails or takes longer than `deadline` seconds. No process is left afterwards.
    """
    with launch.run("ps", deadline, {"TRAINERS": trainers, "JOIN_GRACE": JOIN_GRACE, **variables}) as running:
        for event in running.events():
            if match := EPOCH.match(event.get("event", "")):
                progress(f"epoch {match[1]}")
        done = running.done()
    return Accuracy(float(done["accuracy"]), int(done["updates"]), int(done["samples"]), float(done["seconds"]))


def throughput(
    trainers: int, epochs: int, progress: Callable[[str], None], deadline: float = 180.0, **variables: object
) -> Throughput:
    """Train for a few epochs and measure `epochs` of them, without start-up and checkpoints.

    Raises RuntimeError where the run fails or takes longer than `deadline` seconds. No process is left afterwards.
    """
    settings = PsSettings(**variables)  # type: ignore[arg-type]
    together = settings.batch_size * (trainers if settings.update_mode == "sync" else 1)
    fixed = {"TRAINERS": trainers, "EPOCHS": WARM + epochs + AFTER, "LOG_INTERVAL": -(-SAMPLES // together),
             "CHECKPOINT_INTERVAL": 86400, "JOIN_GRACE": JOIN_GRACE}  # fmt: skip
    stamps: dict[int, float] = {}
    counts: dict[int, list[Counts]] = {}
    cpu: dict[int, float] = {}
    pieces = len(parts(build(settings), settings))
    with launch.run("ps", deadline, {**fixed, **{name.upper(): value for name, value in variables.items()}}) as running:
        for event in running.events():
            if match := EPOCH.match(event.get("event", "")):
                number = int(match[1])
                stamps[number] = datetime.fromisoformat(event["timestamp"]).timestamp()
                progress(f"epoch {number}")
                if number in (WARM, WARM + epochs):
                    cpu[number] = running.cpu_seconds()
                # before the measured epochs and after them: scraping costs time
                if number in (WARM - 1, WARM + epochs):
                    counts[number] = _scrape(running.directory, pieces)
        done = running.done()
    samples = int(done["samples"]) * epochs // int(done["epochs"])
    seconds = stamps[WARM + epochs] - stamps[WARM]
    before, after = counts[WARM - 1], counts[WARM + epochs]

    def per_step(name: str, counter: str) -> float:
        def more(what: str) -> float:
            return float(sum(getattr(b, what) - getattr(a, what) for a, b in zip(before, after, strict=True)))

        # trainers of `autograd` do not exchange
        return more(name) / (more(counter) / pieces) if more(counter) else 0.0

    return Throughput(
        samples,
        seconds,
        per_step("sent_bytes", "calls"),
        per_step("received_bytes", "answers"),
        per_step("wait_seconds", "answers"),
        cpu[WARM + epochs] - cpu[WARM],
    )


@dataclass(frozen=True)
class Counts:
    """A trainer's counters: of the calls that it made to `exchange`, and of the seconds that it stood still."""

    calls: float
    answers: float
    sent_bytes: float
    received_bytes: float
    wait_seconds: float


def _scrape(directory: Path, pieces: int) -> list[Counts]:
    """The counters of every trainer of the run in `directory`."""
    scraped = []
    for rank in targets.ranks_of(directory):
        if rank.name.startswith("trainer"):
            ends = time.monotonic() + SCRAPE_SECONDS
            counts = _counts(rank.url)
            # a step makes `pieces` calls: between two steps bytes and calls fit each other
            while (counts.calls % pieces or counts.answers % pieces) and time.monotonic() < ends:
                counts = _counts(rank.url)
            scraped.append(counts)
    return scraped


def _counts(url: str) -> Counts:
    with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as answer:
        text = answer.read().decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("method", "exchange") == "exchange"
    }
    names = ("rpc_calls_total", "rpc_latency_seconds_count", "rpc_sent_bytes_total", "rpc_received_bytes_total",
             "ps_wait_seconds_sum")  # fmt: skip
    return Counts(*(samples.get(f"rolecall_{name}", 0.0) for name in names))
