"""Spans exported by OpenTelemetry's protocol, against a receiver that reads the protobuf of each request."""

from __future__ import annotations

import asyncio
import gzip
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as proto

from rolecall.observe.trace import lineage, otlp
from rolecall.observe.trace.lineage import Lineage, Placed
from rolecall.observe.trace.otlp import Exporter
from rolecall.rank.collecting import Collector
from rolecall.record import records
from rolecall.record.records import Span
from tests.observe.traces import MS, UNIX, Worker, call

DEADLINE = 20.0  # seconds
CLIENT, SERVER, INTERNAL = 3, 2, 1  # as the protocol numbers kinds


class Receiver:
    """A collector on a port of its own; `status` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, Any], Any]] = []  # the resource's attributes, and the span
        self.status, self.paths = 200, set[str]()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        if self.status != 200:
            return
        for group in proto.ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = plain(group.resource.attributes)
            self.spans += [(resource, span) for scope in group.scope_spans for span in scope.spans]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(DEADLINE)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def training() -> tuple[Worker, Worker]:
    server = Worker("ps", offset=10**13)
    trainer = Worker("trainer", 1, rank=1, offset=5, wall=900 * MS)
    step = trainer.span("step", 0, 20 * MS, step=1)
    client = call(trainer, server, "exchange", MS, MS + 50_000, 9 * MS, 9 * MS + 50_000)
    client.parent = step.id
    trainer.span("lookup", 12 * MS, 13 * MS, "client", step.id, to="ps 0", error="PeerLostError: gone")
    return server, trainer


def by_name(spans: list[tuple[dict[str, Any], Any]]) -> dict[str, tuple[dict[str, Any], Any]]:
    return {f"{span.name} {span.kind}": (resource, span) for resource, span in spans}


def test_spans_arrive_with_standard_attributes_and_one_trace(receiver: Receiver) -> None:
    exporter = Exporter(receiver.url)
    server, trainer = training()
    exporter.export(server.process, server.spans)  # before its caller, and a child before its parent
    exporter.export(trainer.process, reversed(trainer.spans))
    exporter.close()
    assert receiver.paths == {"/v1/traces"}
    spans = by_name(receiver.spans)
    assert set(spans) == {f"step {INTERNAL}", f"ps/exchange {CLIENT}", f"ps/exchange {SERVER}", f"ps/lookup {CLIENT}"}
    step, client, server_span = (spans[f"{name} {kind}"][1] for name, kind in
                                 (("step", INTERNAL), ("ps/exchange", CLIENT), ("ps/exchange", SERVER)))  # fmt: skip
    assert len({span.trace_id for _, span in receiver.spans}) == 1
    assert len(step.trace_id) == 16
    assert step.parent_span_id == b""
    assert client.parent_span_id == step.span_id
    assert server_span.parent_span_id == client.span_id
    resource = spans[f"ps/exchange {CLIENT}"][0]
    assert resource["service.name"] == "ps-trainer"
    assert resource["service.instance.id"] == "trainer-1"
    assert resource["host.name"] == "trainer-1"
    for span in (client, server_span):
        attributes = plain(span.attributes)
        assert {name: attributes[name] for name in ("rpc.system", "rpc.service", "rpc.method")} == {
            "rpc.system": "torch_rpc", "rpc.service": "ps", "rpc.method": "exchange",
        }  # fmt: skip
    lost = spans[f"ps/lookup {CLIENT}"][1]
    assert lost.status.code == 2
    assert lost.status.message == "PeerLostError: gone"
    assert plain(lost.attributes)["error.type"] == "PeerLostError"
    assert plain(client.attributes)["rolecall.sent"] == 8


def test_times_are_unix_times_by_rank_0s_clock(receiver: Receiver) -> None:
    exporter = Exporter(receiver.url)
    server, trainer = training()  # whose wall clock is 0.9 s off
    for worker in (server, trainer):
        lines = b"".join(map(records.line, worker.spans)).decode()
        exporter.export_lines(vars(worker.process), lines + '["span", "torn')
    exporter.close()
    spans = by_name(receiver.spans)
    client, served = (spans[f"ps/exchange {kind}"][1] for kind in (CLIENT, SERVER))
    assert served.start_time_unix_nano == UNIX + MS + 50_000
    assert client.start_time_unix_nano == pytest.approx(UNIX + MS, abs=60_000)
    assert client.start_time_unix_nano <= served.start_time_unix_nano
    assert client.end_time_unix_nano >= served.end_time_unix_nano


def test_a_program_s_own_trace_goes_on(receiver: Receiver) -> None:
    exporter = Exporter(receiver.url)
    server, trainer = training()
    trace, parent = "ab" * 16, "cd" * 8
    trainer.spans[1].attributes["traceparent"] = f"00-{trace}-{parent}-01"
    exporter.export(trainer.process, trainer.spans)
    exporter.export(server.process, server.spans)
    exporter.close()
    spans = by_name(receiver.spans)
    client, served = (spans[f"ps/exchange {kind}"][1] for kind in (CLIENT, SERVER))
    assert client.trace_id.hex() == served.trace_id.hex() == trace
    assert client.parent_span_id.hex() == parent
    assert spans[f"step {INTERNAL}"][1].trace_id != client.trace_id


def test_a_collector_that_refuses_or_is_gone_is_logged_once_and_harms_nothing(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **values: Any) -> None:
            lines.append({"event": event, **values})

    monkeypatch.setattr(otlp.telemetry, "log", Log)
    receiver.status = 400
    exporter = Exporter(receiver.url)
    server, trainer = training()
    for _ in range(3):
        exporter.export(server.process, server.spans)
        exporter.export(trainer.process, trainer.spans)
    wait_for(lambda: lines)
    exporter.export_lines({"job": 1}, "")
    exporter.close()
    assert len(lines) == 1
    assert lines[0]["event"] == "spans are not exported"
    assert "400" in lines[0]["problem"]
    assert lines[0]["spans_dropped"] > 0
    assert capsys.readouterr() == ("", "")  # the library's own lines
    # more than fit are dropped, not waited for
    stuck = Exporter("http://127.0.0.1:9/v1/traces")  # nobody listens on the port for discarding
    monkeypatch.setattr(otlp, "CLOSE", 0.1)
    for _ in range(2 * otlp.MOST_WAITING):
        stuck.export(server.process, server.spans)
    stuck.close()
    assert not receiver.spans


def test_it_is_switched_on_by_the_standard_variable_alone(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in otlp.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert otlp.exporter() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    exporter = otlp.exporter()
    assert exporter is not None
    server, _ = training()
    exporter.export(server.process, server.spans)
    exporter.close()
    ((resource, _),) = receiver.spans
    assert resource["service.name"] == "training"
    assert resource["team"] == "vision"


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **values: Any) -> None:
            lines.append({"event": event, **values})

    monkeypatch.setattr(otlp.telemetry, "log", Log)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)  # as if it were not there
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    exporter = otlp.exporter()
    assert exporter is not None
    wait_for(lambda: lines)
    server, _ = training()
    exporter.export(server.process, server.spans)
    exporter.close()
    assert "rolecall[otel]" in lines[0]["problem"]
    assert len(lines) == 1


# ---- traces


PROCESS = Worker("ps").process


def chain(length: int) -> list[Span]:
    ids = [f"{number + 1:016x}" for number in range(length)]
    return [Span(id, parent, "x", "internal", 0, 1, 1, {}) for id, parent in zip(ids, ["", *ids], strict=False)]


def test_spans_of_one_root_are_one_trace_in_whatever_order_they_come() -> None:
    for seed in range(20):
        spans, placed, known = chain(8), list[Placed](), Lineage()
        random.Random(seed).shuffle(spans)
        for span in spans:
            placed += known.add(PROCESS, span, 0.0)
        assert len(placed) == 8
        assert len({one.trace for one in placed}) == 1
        assert all(one.parent == lineage.number(one.span.parent) for one in placed)


def test_a_parent_that_comes_late_joins_its_children() -> None:
    known, (root, middle, leaf) = Lineage(), chain(3)
    assert list(known.add(PROCESS, leaf, 0.0)) == []
    assert list(known.add(PROCESS, middle, 1.0)) == []
    assert list(known.expire(5.0)) == []
    placed = list(known.expire(lineage.HOLD + 0.5))
    assert [one.span for one in placed] == [middle, leaf]  # both: their topmost ancestor is the same
    placed += known.add(PROCESS, root, 99.0)
    assert len(placed) == 3
    assert len({one.trace for one in placed}) == 1


def test_spans_in_a_circle_are_released_too() -> None:
    known = Lineage()
    one = Span("01", "02", "x", "internal", 0, 1, 1, {})
    other = Span("02", "01", "x", "internal", 0, 1, 1, {})
    assert list(known.add(PROCESS, one, 0.0)) == []
    assert list(known.add(PROCESS, other, 0.0)) == []
    assert {one.span.id for one in known.expire(float("inf"))} == {"01", "02"}


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MOST_HELD", 5)
    monkeypatch.setattr(lineage, "MOST_KNOWN", 5)
    known, placed = Lineage(), list[Placed]()
    for number in range(50):
        placed += known.add(PROCESS, Span(f"{number + 1:x}", f"{number + 1000:x}", "x", "internal", 0, 1, 1, {}), 0.0)
    assert len(placed) == 45
    assert len(known._traces) <= 5


# ---- rank 0's collector


class Sink:
    """In place of an exporter: notes what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.closed = False

    def export_lines(self, process: dict[str, Any], lines: str) -> None:
        self.lines.append((process["generation"], lines))

    def close(self) -> None:
        self.closed = True


def test_rank_0_exports_what_it_collects_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = {"generation": 1}
    file = {"file": "trace-000000001-0000.jsonl", "process": process}
    replies = [
        {**file, "offset": 0, "data": "one\n", "next": 4, "more": True, "ended": False},
        {**file, "offset": 4, "data": "two\n", "next": 8, "more": False, "ended": True},
        *[{**file, "offset": 8, "data": "", "next": 8, "more": False, "ended": True}] * 5,
    ]

    async def ask(what: str, arguments: dict[str, Any], to: Any, timeout: float) -> dict[Any, Any]:
        return {("ps", 0): replies.pop(0)}

    async def disk(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def no_file(_: Collector) -> None:
        pass

    sink = Sink()
    monkeypatch.setattr(Collector, "export", no_file)
    collector = Collector(tmp_path / "trace", lambda: [("ps", 0)], ask, disk, lambda: True, cast(Exporter, sink))
    asyncio.run(collector.finish())
    assert sink.lines == [(1, "one\n"), (1, "two\n")]
    assert sink.closed
