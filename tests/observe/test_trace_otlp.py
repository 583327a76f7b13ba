"""Spans exported by OpenTelemetry's protocol, against a receiver that reads the protobuf of each request."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as proto

from rolecall.observe.trace import otlp
from rolecall.observe.trace.otlp import Exporter
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


def training() -> tuple[Worker, Worker]:
    server, trainer = Worker("ps", offset=10**13), Worker("trainer", 1, rank=1, offset=5)
    step = trainer.span("step", 0, 20 * MS, step=1)
    client = call(trainer, server, "exchange", MS, MS + 50_000, 9 * MS, 9 * MS + 50_000)
    lost = trainer.span("lookup", 12 * MS, 13 * MS, "client", to="ps_0", error="PeerLostError: gone")
    for span in (step, client, lost, *server.spans):
        span.trace = step.id
    client.parent = lost.parent = step.id
    return server, trainer


def send(exporter: Exporter | None, *workers: Worker) -> None:
    assert exporter is not None
    for worker in workers:
        first, rest = worker.file.decode().split("\n", 1)
        exporter.export_lines(first, rest + '["span", "torn')
    exporter.close()


@pytest.fixture
def exporter(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url.removesuffix("/v1/traces"))
    one = otlp.exporter()
    assert one is not None
    return one


def test_spans_arrive_with_standard_attributes_in_one_trace(receiver: Receiver, exporter: Exporter) -> None:
    send(exporter, *training())
    assert receiver.paths == {"/v1/traces"}
    spans = {f"{span.name} {span.kind}": (resource, span) for resource, span in receiver.spans}
    names = (f"step {INTERNAL}", f"ps/exchange {CLIENT}", f"ps/exchange {SERVER}", f"ps/lookup {CLIENT}")
    step, client, served, lost = (spans[name][1] for name in names)
    assert len({span.trace_id for _, span in receiver.spans}) == 1
    assert step.parent_span_id == b""
    assert client.parent_span_id == step.span_id
    assert served.parent_span_id == client.span_id
    assert (served.start_time_unix_nano, served.end_time_unix_nano) == (UNIX + MS + 50_000, UNIX + 9 * MS)
    resource = spans[f"ps/exchange {CLIENT}"][0]
    shown = [resource[name] for name in ("service.name", "service.instance.id", "host.name")]
    assert shown == ["ps-trainer", "trainer_1", "trainer-1"]
    for span in (client, served):
        attributes = plain(span.attributes)
        assert [attributes[f"rpc.{name}"] for name in ("system", "service", "method")] == [
            "torch_rpc",
            "ps",
            "exchange",
        ]
    assert (lost.status.code, lost.status.message) == (2, "PeerLostError: gone")
    assert plain(lost.attributes)["error.type"] == "PeerLostError"


def test_standard_variables_name_the_service_and_enable_the_export(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in otlp.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert otlp.exporter() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    send(otlp.exporter(), training()[0])
    ((resource, _),) = receiver.spans
    assert (resource["service.name"], resource["team"]) == ("training", "vision")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **values: Any) -> None:
            lines.append({"event": event, **values})

    monkeypatch.setattr(otlp.telemetry, "log", Log)
    return lines


def test_a_collector_that_refuses_is_logged_once(
    receiver: Receiver, exporter: Exporter, logged: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 400
    exporter.export_lines('["process",{"job":1}]', "")  # a damaged reply
    send(exporter, *training())
    assert [line["event"] for line in logged] == ["spans are not exported"]
    assert capsys.readouterr() == ("", "")  # the library's own lines


def test_a_collector_that_hangs_delays_the_end_by_no_more_than_the_limit(
    exporter: Exporter, receiver: Receiver, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(receiver, "take", lambda *_: over.wait(30))
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.1)
    began = time.monotonic()
    send(exporter, training()[0])
    assert time.monotonic() - began < 5
    over.set()
    assert "too slow" in logged[-1]["problem"]
