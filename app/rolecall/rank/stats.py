"""A supervisor's reply to the query `ReadStats`: counters and gauges of its worker, and its newest log errors.

Counters are cumulative: a client computes rates between two replies (observe/page/rates.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from typing import Any

import psutil

from rolecall import telemetry
from rolecall.observe.page.rates import LogEvent, Method, QueueCounters, Stats, WeightsCounters
from rolecall.rank.worker_manager import WorkerManager
from rolecall.telemetry import PREFIX, WorkerFiles

# names of samples, without the prefix
BUCKETS, CALLEE = "rpc_latency_seconds_bucket", "rpc_callee"
# of rank 0
VALUES = ("step", "done_total", "left_seconds")
COUNTS = ("rpc_calls_total", "rpc_failures_total", "rpc_sent_bytes_total", "rpc_received_bytes_total")
# of a queue, and of weights; each is a field of QueueCounters or WeightsCounters
QUEUE = {"queue_depth": "depth", "queue_size": "size", "queue_items_total": "items"}
WEIGHTS = {"weights_version": "version", "weights_bytes_total": "received", "weights_saved_bytes_total": "saved"}
MAX_TRACEBACK_CHARACTERS = 1500
HIDDEN_FIELDS = ("event", "level", "timestamp", "exception", "exc_info", "role", "ordinal")


async def read(workers: WorkerManager, started: float) -> Stats:
    """The statistics of the rank with `workers`, whose supervisor `started` at that Unix time."""
    worker = workers.worker
    values = {
        "worker_bytes": worker.resident_bytes() if worker else 0,
        "supervisor_bytes": psutil.Process().memory_info().rss,
        "worker_starts": next(iter(workers.metrics.worker_starts.collect())).samples[0].value,
    }
    stats = await asyncio.to_thread(of_files, workers.files)  # merges them, in milliseconds
    return replace(stats, started=started, at=time.monotonic(), values=values | stats.values, log=events())


def of_files(files: WorkerFiles) -> Stats:
    """The part of `Stats` that is of a rank's workers: their gauges and counters, from their files."""
    counts = defaultdict[str, dict[str, float]](lambda: dict.fromkeys(COUNTS, 0.0))
    roles, buckets = defaultdict[str, list[str]](list), defaultdict[str, dict[float, float]](dict)
    queues, weights = defaultdict[str, dict[str, float]](dict), defaultdict[str, dict[str, float]](dict)
    values: dict[str, float] = {}
    for sample in (sample for family in files.collect() for sample in family.samples):
        name, labels = sample.name.removeprefix(PREFIX), sample.labels
        if not math.isfinite(sample.value):  # JSON has no others
            continue
        if name in VALUES:
            values[name] = sample.value
        elif name in QUEUE:
            queues[labels["name"]][QUEUE[name]] = sample.value
        elif name in WEIGHTS:
            weights[labels["name"]][WEIGHTS[name]] = sample.value
        elif name in COUNTS:
            counts[labels["method"]][name] = sample.value
        elif name == CALLEE:
            roles[labels["method"]].append(labels["callee"])
        elif name == BUCKETS:
            buckets[labels["method"]][float(labels["le"])] = sample.value
    bounds = (*telemetry.LATENCY, math.inf)
    methods = {}
    for name in {*counts, *roles, *buckets}:
        calls, failures, sent, received = counts[name].values()
        latency = [buckets[name].get(bound, 0.0) for bound in bounds]
        counted = Method(calls, failures, sent, received)
        methods[name] = replace(counted, buckets=latency, roles=roles[name])
    return Stats(
        started=0.0,
        at=0.0,
        methods=methods,
        values=values,
        log=[],
        queues={name: QueueCounters(**counters) for name, counters in queues.items()},
        weights={name: WeightsCounters(**counters) for name, counters in weights.items()},
    )


def events() -> list[LogEvent]:
    """The newest warnings and errors that this process has logged, each with its fields."""
    return [_event(event) for event in [*telemetry.recent]]


def _event(event: dict[str, Any]) -> LogEvent:
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in HIDDEN_FIELDS)
    text = f"{event['event']} {fields}".strip()
    if trace := str(event.get("exception") or ""):
        text += "\n" + trace[-MAX_TRACEBACK_CHARACTERS:]
    return LogEvent(datetime.fromisoformat(event["timestamp"]).timestamp(), str(event["level"]), text)
