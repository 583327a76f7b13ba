"""Metrics and logs.

A metric is declared once, as a `Metric`, in `SUPERVISOR`, `COORDINATOR` or `WORKER` below or in a job's `metrics`
module. A worker's metrics are kept in memory-mapped files (prometheus_client's multiprocess mode), so that they outlive
the worker; its supervisor serves them beside its own.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import Metric as Samples
from prometheus_client.multiprocess import MultiProcessCollector

from rolecall import config
from rolecall.config import __version__
from rolecall.gang.protocol import Cause, GangState, WorkerState

PREFIX = "rolecall_"
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
LATENCY = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
DURATION = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0)
JOIN_DURATION = (0.2, 0.5, 1.0, 2.0, 4.0, 6.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)  # a model may load for minutes


def _values(kind: Any) -> set[Any]:
    """The values of a Literal, or of several."""
    return {value for each in get_args(kind) for value in (_values(each) or {each})}


CAUSES = tuple(sorted(_values(Cause) - {"", "finished"}))
WORKER_CAUSES = ("killed", "crashed", "failed", "stuck", "silent", "lost", "refused")  # by which a worker may end early
WORKER_STATES = get_args(WorkerState)
PHASES = ("none", "checking", "loading", "restoring", "compiling", "evaluating", "saving", "debugging")
GANG_STATES = get_args(GangState)


@dataclass(frozen=True)
class Metric:
    """A metric's declaration. `name` is without the prefix; `roles` empty means every role has it."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = LATENCY
    roles: tuple[str, ...] = ()

    # bucket bounds in seconds
    LATENCY: ClassVar = LATENCY
    DURATION: ClassVar = DURATION

    @property
    def full_name(self) -> str:
        """The name in Prometheus."""
        return PREFIX + self.name

    @property
    def attribute(self) -> str:
        """The attribute's name in the result of `build`."""
        return self.name.removesuffix("_total")

    def make(self, registry: CollectorRegistry) -> Any:
        """The metric as prometheus_client's object, in `registry`."""
        name = self.full_name
        match self.kind:
            case "counter":
                return prometheus_client.Counter(name, self.help, self.labels, registry=registry)
            case "gauge":
                return prometheus_client.Gauge(
                    name, self.help, self.labels, registry=registry, multiprocess_mode="mostrecent"
                )
            case "histogram":
                return prometheus_client.Histogram(
                    name, self.help, self.labels, buckets=self.buckets, registry=registry
                )


SUPERVISOR = (
    Metric(
        "gauge",
        "rank_info",
        "The rank's job, role, ordinal and version; always 1.",
        ("job", "role", "ordinal", "version"),
    ),
    Metric("gauge", "up_since_seconds", "Unix time at which the supervisor started."),
    Metric("gauge", "generation", "Number of the rank's generation; 0 for none."),
    Metric("gauge", "worker_state", "1 for the worker's current state, 0 for the others.", ("state",)),
    Metric("gauge", "phase", "1 for the worker's current phase, 0 for the others.", ("state",)),
    Metric("gauge", "worker_resident_bytes", "Resident memory of the worker process in bytes."),
    Metric("gauge", "supervisor_resident_bytes", "Resident memory of the supervisor process in bytes."),
    Metric("counter", "worker_starts_total", "Worker processes started, without spares (SPARES)."),
    Metric("counter", "worker_restarts_total", "Workers that ended early, by cause.", ("cause",)),
    Metric("counter", "worker_attaches_total", "Times that a live worker was told to join a generation."),
    Metric(
        "histogram",
        "worker_attach_seconds",
        "Time from the order to join a generation until a live worker runs in it.",
        buckets=DURATION,
    ),
    Metric("gauge", "spare_workers", "Spare workers that are loaded (SPARES)."),
    Metric("counter", "gang_unreachable_total", "Requests to the coordinator without an answer."),
    Metric(
        "gauge",
        "disk_wait_seconds",
        "Duration so far of the longest pending file operation in CHECKPOINT_DIR; 0 for none.",
    ),
    Metric("gauge", "tunnel_connections", "Open connections between this rank's tunnel and its peers."),
    Metric("counter", "tunnel_bytes_total", "Bytes through this rank's tunnel, in both directions."),
    Metric("counter", "tunnel_refused_total", "Connections refused by this rank's tunnel, by reason.", ("reason",)),
    Metric("counter", "metric_files_dropped_total", "Unreadable metric files deleted."),
)
COORDINATOR = (
    Metric("gauge", "gang_state", "1 for the gang's current state, 0 for the others.", ("state",)),
    Metric("gauge", "gang_members", "Ranks in the running generation, by role.", ("role",)),
    Metric("gauge", "gang_registered", "Ranks with a valid lease, by role.", ("role",)),
    Metric("gauge", "gang_wanted", "Ranks required to start a generation, by role.", ("role",)),
    Metric("counter", "gang_generations_total", "Generations started."),
    Metric("counter", "gang_restarts_total", "Ended generations and lost elastic ranks, by cause.", ("cause",)),
    Metric("counter", "gang_joins_total", "Members that joined a running generation."),
    Metric("counter", "gang_stays_total", "Members whose worker stayed alive from one generation to the next."),
    Metric("counter", "gang_refused_total", "Requests refused by the coordinator, by reason.", ("reason",)),
    Metric(
        "histogram",
        "recovery_seconds",
        "Time from the end of a generation to the first step of the next.",
        buckets=DURATION,
    ),
    Metric(
        "histogram",
        "gang_join_seconds",
        "Time from a member's order to load a worker until it has joined the running generation.",
        buckets=JOIN_DURATION,
    ),
    Metric("gauge", "checkpoint_interval_seconds", "Seconds between checkpoints (CHECKPOINT_INTERVAL)."),
    Metric(
        "gauge",
        "job_info",
        "The job's names for its score and its unit of work, and its roles; always 1.",
        ("score", "unit", "roles"),
    ),
)
WORKER = (
    Metric("counter", "rpc_calls_total", "Remote calls made, by method.", ("method",)),
    Metric("counter", "rpc_failures_total", "Remote calls that failed, by method.", ("method",)),
    Metric("counter", "rpc_sent_bytes_total", "Payload bytes sent with remote calls, by method.", ("method",)),
    Metric("counter", "rpc_received_bytes_total", "Payload bytes received in answers, by method.", ("method",)),
    Metric("histogram", "rpc_latency_seconds", "Time from a remote call to its answer, by method.", ("method",)),
    Metric("gauge", "rpc_callee", "1 for each role on which a method was called.", ("method", "callee")),
    Metric("gauge", "queue_depth", "Items in a queue, at its owner.", ("name",)),
    Metric("gauge", "queue_size", "Most items that a queue may have, at its owner.", ("name",)),
    Metric("counter", "queue_items_total", "Items put into a queue, at its owner.", ("name",)),
    Metric(
        "counter",
        "queue_wait_seconds_total",
        "Time that puts waited for room in a queue, and gets for an item, at its owner.",
        ("name", "method"),
    ),
    Metric("gauge", "weights_version", "Newest complete version of published weights, by name.", ("name",)),
    Metric("counter", "weights_bytes_total", "Bytes of weights received, by name.", ("name",)),
    Metric(
        "counter",
        "weights_saved_bytes_total",
        "Bytes of weights not sent since they were there already or in a narrower type, by name.",
        ("name",),
    ),
    Metric(
        "histogram",
        "weights_seconds",
        "Time from when a version is known until all of it is there, by name.",
        ("name",),
        buckets=DURATION,
    ),
    Metric("gauge", "rpc_connect_seconds", "Duration of the newest generation's RPC rendezvous."),
    Metric("gauge", "checkpoint_timestamp_seconds", "Unix time of the newest checkpoint.", roles=("rank 0",)),
    Metric("histogram", "checkpoint_seconds", "Time to write a checkpoint.", buckets=DURATION, roles=("rank 0",)),
    Metric("counter", "checkpoint_failures_total", "Checkpoints that failed.", roles=("rank 0",)),
    Metric("counter", "checkpoint_copy_failures_total", "Copies that failed.", roles=("rank 0",)),
    Metric("gauge", "step", "Steps completed (updates, iterations).", roles=("rank 0",)),
    Metric(
        "counter",
        "stalled_seconds_total",
        "Time by which steps in which members joined or were lost exceeded the usual one, by cause.",
        ("cause",),
        roles=("rank 0",),
    ),
    Metric("gauge", "epoch", "Current epoch, counted from 1.", roles=("rank 0",)),
    Metric("counter", "done_total", "Work completed, in the job's unit: steps, samples or tokens.", roles=("rank 0",)),
    Metric("gauge", "left_seconds", "Estimated time until training ends.", roles=("rank 0",)),
    Metric("gauge", "loss", "Mean training loss since the last progress line of the log.", roles=("rank 0",)),
    Metric("gauge", "score", "Newest score: return, accuracy or perplexity, by job.", roles=("rank 0",)),
    Metric("gauge", "goal", "Score at which the job counts as solved.", roles=("rank 0",)),
    Metric("gauge", "value", "A value that the job logs, by name.", ("name",), roles=("rank 0",)),
    Metric("gauge", "evaluating", "1 while training waits for this rank's evaluation, else 0."),
    Metric("counter", "nonfinite_losses_total", "Steps rejected because the loss or a gradient is not finite."),
)
recent: deque[dict[str, Any]] = deque(maxlen=8)  # the newest warnings and errors that this process has logged
SHARED = {metric.attribute for metric in (*SUPERVISOR, *COORDINATOR, *WORKER)}  # names that no job's metric may have


def build(declared: Iterable[Metric], registry: CollectorRegistry | None = None) -> Any:
    """Makes the metrics; returns them as attributes: `rpc_calls_total` as `.rpc_calls`."""
    registry = registry or CollectorRegistry()
    prometheus_client.disable_created_metrics()  # a second series for each counter
    return SimpleNamespace(**{metric.attribute: metric.make(registry) for metric in declared})


def build_supervisor(directory: Path, is_rank0: bool) -> tuple[CollectorRegistry, Any, WorkerFiles]:
    """A supervisor's registry, its metrics (at rank 0 with the coordinator's), and the files in `directory` with those
    of its workers."""
    registry = CollectorRegistry()
    metrics = build(SUPERVISOR + (COORDINATOR if is_rank0 else ()), registry)
    metrics.up_since_seconds.set_to_current_time()
    files = WorkerFiles(directory, metrics.metric_files_dropped.inc)
    registry.register(files)
    return registry, metrics, files


def name_rank(info: Any, job: str, role: str, ordinal: int | None) -> None:
    """Sets the gauge `rank_info` to this rank alone."""
    with warnings.catch_warnings(action="ignore"):  # about workers' files, which do not hold it
        info.clear()
    info.labels(job, role, "" if ordinal is None else str(ordinal), __version__).set(1)


def build_worker(declared: Iterable[Metric], role: str, is_rank0: bool) -> Any:
    """The metrics of a worker with `role`, in files that the next worker continues."""
    values.ValueClass = values.MultiProcessValue(lambda: "worker")
    return build(of_role(declared, role, is_rank0))


def of_role(declared: Iterable[Metric], role: str, is_rank0: bool) -> list[Metric]:
    """The metrics in `declared` that a rank with `role` has."""
    roles = {role, "rank 0"} if is_rank0 else {role}
    return [metric for metric in declared if not metric.roles or roles & set(metric.roles)]


def use_directory(directory: Path) -> None:
    """Makes workers keep their metrics in `directory`; this process keeps its own, in memory."""
    config.export(PROMETHEUS_MULTIPROC_DIR=str(directory))


def one_hot(gauge: Any, states: Iterable[str], state: str) -> None:
    """Sets a gauge with a `state` label to 1 for `state` and to 0 for the others."""
    for name in states:
        gauge.labels(name).set(name == state)


def init_labels(counter: Any, values: Iterable[str]) -> None:
    """Starts a counter with one label at 0 for each of `values`: one that first appears as 1 shows no increase."""
    for value in values:
        counter.labels(value)


def catalogue(job: Iterable[Metric] = ()) -> list[tuple[str, str, str, str, str]]:
    """Every metric as (name, kind, labels, where, meaning)."""
    rows: list[tuple[str, str, str, str, str]] = []
    for where, declared in (("every rank", SUPERVISOR), ("rank 0", COORDINATOR), ("every rank", (*WORKER, *job))):
        for metric in declared:
            place = ", ".join(metric.roles) or where
            rows.append((metric.full_name, metric.kind, ", ".join(metric.labels), place, metric.help))
    return rows


class WorkerFiles:
    """Collects the metrics in the files of a rank's workers. A scrape skips a file that cannot be read: it is torn, or
    a worker is just creating it. `free` deletes torn files between two workers.

    One worker after the other keeps its files in `directory`; those that live beside it, in folders below. Counters are
    summed, gauges are those of the worker in `use`. `dropped` is called for each file deleted.
    """

    def __init__(self, directory: Path, dropped: Callable[[], None]) -> None:
        self.directory = self._used = directory
        self._dropped = dropped

    def free(self, in_use: Collection[Path]) -> Path:
        """A folder for a new worker, other than those `in_use`, without files that cannot be read: with them no worker
        could start."""
        folders = (self.directory, *(self.directory / f"worker-{number}" for number in range(1, len(in_use) + 1)))
        folder = next(each for each in folders if each not in in_use)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob("*.db"):
            if not _readable(path):
                path.unlink(missing_ok=True)
                self._dropped()
        return folder

    def use(self, directory: Path) -> None:
        """From now on, the rank's worker is the one with that folder."""
        self._used = directory

    def collect(self) -> Iterator[Samples]:
        """The metrics, as prometheus_client's registry asks for them."""
        paths = [*self.directory.glob("*.db"), *self.directory.glob("worker-*/*.db")]
        shown = [path for path in paths if path.parent == self._used or not path.name.startswith("gauge")]
        yield from MultiProcessCollector.merge([str(path) for path in shown if _readable(path)])


def step_in(directory: Path) -> int:
    """The newest step of rank 0's worker, by the workers' files in `directory`; 0 for none."""
    samples = (sample for metric in WorkerFiles(directory, lambda: None).collect() for sample in metric.samples)
    return int(max((sample.value for sample in samples if sample.name == f"{PREFIX}step"), default=0))


def _readable(path: Path) -> bool:
    try:
        MultiProcessCollector.merge([str(path)])
    except Exception:  # of many kinds, depending on where the file is torn
        return False
    return True


def setup_logging(
    format: Literal["text", "json"],
    level: str,
    stream: Any = None,
    labels: Callable[[], dict[str, Any]] = dict,
    **bound: Any,
) -> None:
    """Logs one event a line to standard output, or `stream`, with `bound` (role, ordinal, generation) on each, and with
    the `labels` of the thread."""
    text = structlog.dev.ConsoleRenderer(
        colors=sys.stdout.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if format == "json" else text
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if format == "json" else []),
            _bound(lambda: {**bound, **labels()}),
            _remember,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # in one write, line end included: a rank's processes share their output, which has no buffer
        logger_factory=structlog.WriteLoggerFactory(stream or sys.stdout),
        cache_logger_on_first_use=False,
    )


def _bound(bound: Callable[[], dict[str, Any]]) -> structlog.typing.Processor:
    # not contextvars: a worker's RPC threads start with an empty context
    def add(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**event, **{key: value for key, value in bound().items() if key not in event and value is not None}}

    return add


def _remember(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if event["level"] in ("warning", "error", "critical"):
        recent.append(dict(event))
    return event


class _ToLog(logging.Handler):
    """Passes records of `logging` on to this process's log; below a warning only those of code that is no library's, or
    of the package `package`."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self._package = package

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            name = record.name
            users = not record.pathname.startswith(LIBRARIES) or name.partition(".")[0] in ("root", self._package)
            if record.levelno < logging.WARNING and not users:
                return
            level = max(each for each in (0, *LEVELS) if each <= record.levelno)
            bound = {} if name == "root" else {"logger": name}
            log().log(level or logging.DEBUG, record.getMessage(), exc_info=record.exc_info, **bound)
        except Exception:  # a wrong argument of the message, as `logging` reports it
            self.handleError(record)


def take_logging(level: str, package: str = "") -> None:
    """From now on, this process's log has what `logging` is given: from `level` on what the user's code logs, that of
    the package `package` included, and warnings of other libraries. A handler that the user has set stays alone."""
    if not logging.root.handlers:
        logging.root.addHandler(_ToLog(package))
        logging.root.setLevel(level.upper())


def log(**bound: Any) -> Any:
    """A logger, with `bound` on each of its events."""
    return structlog.get_logger(**bound)


def cause(text: str) -> dict[str, str]:
    """A cause as an event's fields: its last line, and the full text if it is a traceback."""
    lines = text.strip().splitlines()
    return {} if not lines else {"cause": lines[-1]} if len(lines) == 1 else {"cause": lines[-1], "exception": text}


def warn_misspelt(settings: Iterable[str]) -> None:
    """Logs a warning for each environment variable that looks like one of `settings` misspelt."""
    for variable, meant in config.misspelt(settings):
        log().warning("a variable looks misspelt and has no effect", variable=variable, meant=meant)


class Timer:
    """`with Timer() as timer: ...` leaves the seconds that passed in `timer.seconds`."""

    seconds = 0.0

    def __enter__(self) -> Timer:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
