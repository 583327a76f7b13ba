"""Exports the spans of all ranks from rank 0 by OpenTelemetry's SDK: OTLP over HTTP, in batches, from a thread.

The SDK reads its standard variables; OTEL_EXPORTER_OTLP_ENDPOINT enables the export. Attributes follow OpenTelemetry's
semantic conventions for remote procedure calls. Times are those of each rank's wall clock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from rolecall import config, telemetry
from rolecall.record import records
from rolecall.record.records import Beginning, Process, SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
RPC_SYSTEM = "torch_rpc"
MAX_QUEUED_SPANS = 2**16  # more are dropped
CLOSE_SECONDS = 5.0  # for the rest at the end
LOG_REPEAT_SECONDS = 60.0


def exporter() -> Exporter | None:
    """The exporter that OpenTelemetry's variables ask for, if they do. Loads the SDK, which takes a second. A failure
    is logged: training goes on without the export."""
    if not any(map(config.exported, VARIABLES)):
        return None
    try:
        return Exporter()
    except ImportError as error:
        problem = f"{VARIABLES[-1]} is set, but its packages are missing; install 'rolecall[otel]' ({error})"
    except Exception as error:  # of the SDK, about its variables
        problem = f"OpenTelemetry refuses its settings: {error}"
    telemetry.log().warning("spans are not exported", problem=problem)
    return None


class Exporter:
    """Sends spans to the collector that OpenTelemetry's variables name. Failures are logged once a minute."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # the extra `otel`
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logger = logging.getLogger("opentelemetry")
        logger.propagate, logger.handlers = False, [_Log(logging.WARNING)]
        self._processor = BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=MAX_QUEUED_SPANS)
        self._resources: dict[Process, Resource] = {}

    def export_lines(self, first: str, lines: str) -> None:
        """Queues the spans in these lines of a file; `first` is its first line, which names the process. Damaged lines
        are left out."""
        process: Process | None = None
        for text in (first, *lines.splitlines()):
            with contextlib.suppress(ValueError):
                record = records.parse(text)
                if isinstance(record, Beginning):
                    process = record.process
                elif isinstance(record, SpanRecord) and process:
                    self._processor.on_end(self._translate(process, record))

    def close(self) -> None:
        """Sends the rest, for `CLOSE_SECONDS` at most."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            telemetry.log().warning("spans are not exported", problem="the collector is too slow for the last spans")

    def _translate(self, process: Process, span: SpanRecord) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        kinds = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER}
        trace, flags, error = int(span.trace, 16), TraceFlags(TraceFlags.SAMPLED), str(span.attributes.get("error", ""))
        parent = SpanContext(trace, int(span.parent, 16), span.kind == "server", flags) if span.parent else None
        called = str(span.attributes.get("to", "")) if span.kind == "client" else process.name
        service = called.rpartition("_")[0] or called
        attributes = {f"rolecall.{name}": value for name, value in span.attributes.items() if name != "error"}
        attributes |= {"rolecall.rank": process.rank, "rolecall.generation": process.generation}
        attributes |= {"thread.id": span.thread}
        if span.kind in kinds:
            attributes |= {"rpc.system": RPC_SYSTEM, "rpc.service": service, "rpc.method": span.name}
        if error:
            attributes["error.type"] = error.partition(":")[0]
        return ReadableSpan(
            f"{service}/{span.name}" if span.kind in kinds else span.name,
            SpanContext(trace, int(span.id, 16), is_remote=False, trace_flags=flags),
            parent,
            self._resource(process),
            attributes,
            kind=kinds.get(span.kind, SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=process.wall_ns + span.start_ns,
            end_time=process.wall_ns + span.end_ns,
            instrumentation_scope=InstrumentationScope("rolecall", config.__version__),
        )

    def _resource(self, process: Process) -> Resource:
        from opentelemetry.sdk.resources import Resource

        if process not in self._resources:
            attributes: dict[str, Any] = {
                "service.namespace": "rolecall",
                "service.instance.id": process.name,
                "host.name": process.host,
                "process.pid": process.pid,
            }
            if not config.exported("OTEL_SERVICE_NAME"):
                attributes["service.name"] = f"{process.job}-{process.role}"
            self._resources[process] = Resource.create(attributes)
        return self._resources[process]


class _Log(logging.Handler):
    """OpenTelemetry's log, once a minute."""

    _logged = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the message."""
        now = time.monotonic()
        if now - self._logged > LOG_REPEAT_SECONDS:
            self._logged = now
            telemetry.log().warning("spans are not exported", problem=record.getMessage()[:300])
