"""Exports the spans of all ranks by OpenTelemetry's protocol (OTLP over HTTP), from rank 0's supervisor.

OpenTelemetry's SDK reads its standard variables, of which OTEL_EXPORTER_OTLP_ENDPOINT switches this on. Names follow
its semantic conventions for remote procedure calls.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rolecall import config, telemetry
from rolecall.observe.trace.clocks import Clocks
from rolecall.observe.trace.lineage import Lineage, Placed, number
from rolecall.record import records
from rolecall.record.records import Process, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SYSTEM = "torch_rpc"
BATCH = 512  # spans of a request
MOST_WAITING = 64  # lots of lines; more are dropped while the collector does not answer
MOST_CALLS = 50_000  # of which one side has come
MOST_WINDOWS = 400  # of a pair of clocks: 100 s
PERIOD = 1.0  # seconds between two looks at spans that are held
REPEAT = 60.0  # seconds between two log lines on failures
CLOSE = 5.0  # seconds for what is left at the end
LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
Lot = tuple[Process, Iterable[Span] | str]


def exporter() -> Exporter | None:
    """An exporter to where OpenTelemetry's variables say; None where they say nothing."""
    return Exporter() if any(map(config.exported, VARIABLES)) else None


class Exporter:
    """Sends spans to `endpoint`, a URL with its path (by default, what the variables say), from a thread of its own.

    Failures are logged, once a minute. Where OpenTelemetry is not installed, or refuses its variables, that is logged,
    and nothing is sent: training goes on.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint, self._said = endpoint, _Said()
        self._sender: SpanExporter | None = None
        self._lots: queue.Queue[Lot] = queue.Queue(MOST_WAITING)
        self._lineage, self._clocks = Lineage(), Clocks(most=MOST_WINDOWS)
        self._sides = OrderedDict[str, tuple[Process, Span]]()  # the first side of a call that has come
        self._resources: dict[Process, Resource] = {}
        self._ready: list[Placed] = []
        self._dropped, self._complained = 0, float("-inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def export(self, process: Process, spans: Iterable[Span]) -> None:
        """Has these spans sent. Returns at once."""
        self._put((process, list(spans)))

    def export_lines(self, process: dict[str, Any], lines: str) -> None:
        """Has the spans in these lines of a file sent; `process` is what its first line says. Returns at once."""
        try:
            self._put((records.process_of(process), lines))
        except ValueError:
            self._complain("the records of a rank name no process")

    def _put(self, lot: Lot) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._lots.put_nowait(lot)
        except queue.Full:
            self._dropped += 1
            self._complain("the collector is too slow", lots_dropped=self._dropped)

    def close(self) -> None:
        """Sends what there is, for `CLOSE` seconds at most, and ends."""
        self._closing.set()
        self._thread.join(CLOSE)
        if self._sender:
            self._sender.shutdown()
        if self._thread.is_alive():
            self._complain("the collector is too slow, and the last spans are lost")

    # ---- the thread

    def _run(self) -> None:
        self._sender = self._open()
        while self._sender:
            closing = self._closing.is_set()
            try:
                self._round(closing)
            except Exception as error:  # whatever it is: training goes on
                self._ready.clear()
                self._complain(_first(error))
            if closing and self._lots.empty():
                return

    def _open(self) -> SpanExporter | None:
        """Loads OpenTelemetry, which takes a second: not in the supervisor's event loop."""
        logger = logging.getLogger(LOGGER)
        logger.propagate, logger.handlers = False, [self._said]
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # optional: the extra `otel`

            return trace_exporter.OTLPSpanExporter(self._endpoint)
        except ImportError as error:
            problem = f"{VARIABLES[-1]} is set, but its packages are missing; install 'rolecall[otel]'"
            telemetry.log().warning("spans are not exported", problem=f"{problem} ({error})")
        except Exception as error:  # whatever it says of its variables
            telemetry.log().warning("spans are not exported: OpenTelemetry refuses its settings", problem=_first(error))
        return None

    def _round(self, closing: bool) -> None:
        lots = list[Lot]()
        try:
            lots.append(self._lots.get(timeout=0.0 if closing else PERIOD))
            while len(lots) < MOST_WAITING:
                lots.append(self._lots.get_nowait())
        except queue.Empty:
            pass
        now = time.monotonic()
        for process, spans in lots:
            self._clocks.add(process)
            for span in _spans(spans):
                self._match(process, span)
                self._ready += self._lineage.add(process, span, now)
        self._ready += self._lineage.expire(float("inf") if closing and self._lots.empty() else now)
        if self._ready:
            self._clocks.solve()
        while self._ready:
            batch, self._ready = self._ready[:BATCH], self._ready[BATCH:]
            self._send(batch)

    def _match(self, process: Process, span: Span) -> None:
        """Takes in the round trip of a call whose other side has come before."""
        call = span.id if span.kind == "client" else span.parent if span.kind == "server" else ""
        if not call:
            return
        other = self._sides.pop(call, None)
        if other is None or other[1].kind == span.kind:
            self._sides[call] = process, span
            if len(self._sides) > MOST_CALLS:
                self._sides.popitem(last=False)
            return
        (caller, client), (called, server) = ((process, span), other) if span.kind == "client" else (
            other, (process, span))  # fmt: skip
        self._clocks.observe(caller, called, client.start_ns, server.start_ns, server.end_ns, client.end_ns)

    def _send(self, batch: list[Placed]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self._sender is not None
        if self._sender.export([self._translate(placed) for placed in batch]) is not SpanExportResult.SUCCESS:
            self._dropped += len(batch)
            self._complain(self._said.last or "no reason given", spans_dropped=self._dropped)

    def _complain(self, problem: str, **details: Any) -> None:
        now = time.monotonic()
        if now - self._complained > REPEAT:
            self._complained = now
            telemetry.log().warning("spans are not exported", problem=problem[:300], **details)

    # ---- as OpenTelemetry has it

    def _translate(self, placed: Placed) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        span, process = placed.span, placed.process
        align = self._clocks.aligner(process)
        kinds = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER}
        flags, error = TraceFlags(TraceFlags.SAMPLED), str(span.attributes.get("error", ""))
        called = str(span.attributes.get("to", "")) if span.kind == "client" else process.name
        service = called.rpartition(" ")[0] or called
        return ReadableSpan(
            f"{service}/{span.name}" if span.kind in kinds else span.name,
            SpanContext(placed.trace, number(span.id), is_remote=False, trace_flags=flags),
            SpanContext(placed.trace, placed.parent, is_remote=span.kind == "server", trace_flags=flags)
            if placed.parent
            else None,
            self._resource(process),
            _attributes(process, span, service),
            kind=kinds.get(span.kind, SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=self._clocks.unix_ns(align(span.start_ns)),
            end_time=self._clocks.unix_ns(align(span.end_ns)),
            instrumentation_scope=InstrumentationScope("rolecall", config.__version__),
        )

    def _resource(self, process: Process) -> Resource:
        from opentelemetry.sdk.resources import Resource

        if process not in self._resources:
            named = config.exported("OTEL_SERVICE_NAME")
            self._resources[process] = Resource.create({
                **({} if named else {"service.name": f"{process.job}-{process.role}"}),
                "service.namespace": "rolecall",
                "service.instance.id": f"{process.role}-{process.ordinal}",
                "host.name": process.host,
                "process.pid": process.pid,
            })  # fmt: skip
        return self._resources[process]


def _attributes(process: Process, span: Span, service: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {f"rolecall.{name}": value for name, value in span.attributes.items()
                                  if name not in ("error", "traceparent")}  # fmt: skip
    attributes |= {"rolecall.rank": process.rank, "rolecall.generation": process.generation, "thread.id": span.thread}
    if span.kind in ("client", "server"):
        attributes |= {"rpc.system": SYSTEM, "rpc.service": service, "rpc.method": span.name}
    if error := str(span.attributes.get("error", "")):
        attributes["error.type"] = error.partition(":")[0]
    return attributes


def _spans(spans: Iterable[Span] | str) -> Iterable[Span]:
    return records.spans_of(spans.splitlines()) if isinstance(spans, str) else spans


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class _Said(logging.Handler):
    """What OpenTelemetry's exporter says last, in place of its own log lines."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Remembers the line."""
        self.last = record.getMessage()
