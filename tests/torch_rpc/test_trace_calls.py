"""Remote calls as spans: at the caller, at the peer, in turn; OpenTelemetry's context goes with them; collectives."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

from rolecall import in_turn
from rolecall.context.context import Context
from rolecall.jobs.hybrid import trainer
from rolecall.record import recorder as module
from rolecall.record.recorder import NOTHING, Recorder
from rolecall.record.records import SpanRecord, parse
from rolecall.torch_rpc import tracing, turns
from tests.context import contexts

ABOUT = {"job": "rl", "role": "lead", "ordinal": 0, "rank": 0, "generation": 1}
ANSWERS: list[Future[int]] = []
SEEN: list[Any] = []


class Trace:
    """A recorder, and what it wrote."""

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self.recorder, self.path = recorder, path

    def spans(self) -> list[SpanRecord]:
        self.recorder.flush()
        records = map(parse, self.path.read_text().splitlines())
        return [record for record in records if isinstance(record, SpanRecord)]

    def pair(self) -> tuple[SpanRecord, SpanRecord]:
        """The only call: its client span and its server span."""
        spans = {span.kind: span for span in self.spans() if span.kind in ("client", "server")}
        assert spans["server"].parent == spans["client"].id
        assert spans["server"].name == spans["client"].name
        return spans["client"], spans["server"]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trace]:
    """Records what calls do."""
    monkeypatch.setattr(module, "WRITE_PERIOD_SECONDS", 3600.0)
    before = [*gc.callbacks]
    gc.disable()  # a collection is a span: only the ones that a test asks for
    recorder = Recorder()
    monkeypatch.setattr(tracing, "recorder", recorder)
    recorder.start(tmp_path / "trace", ABOUT)
    yield Trace(recorder, tmp_path / "trace")
    recorder.close()
    gc.callbacks[:] = before
    gc.enable()


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of RPC: what is called runs in another thread. Returns the functions that peers were sent."""
    sent: list[Any] = []

    def rpc_async(to: str, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Future[Any]:
        sent.append(function)
        answer: Future[Any] = Future()
        unpickled, given = pickle.loads(pickle.dumps((function, args)))

        def run() -> None:
            try:
                value = unpickled(*given)
            except Exception as error:
                answer.set_exception(error)  # type: ignore[arg-type]
            else:
                if hasattr(function, "_wrapped_async_rpc_function"):
                    value.add_done_callback(lambda done: forward(done, answer))
                else:
                    answer.set_result(value)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return answer

    monkeypatch.setattr(rpc, "rpc_async", rpc_async)
    return sent


def forward(done: Future[Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(done.value())
    except Exception as error:
        answer.set_exception(error)  # type: ignore[arg-type]


def call(function: Callable[..., Any], *args: Any) -> Future[Any]:
    return tracing.call("ps_0", function, args)


# ---- functions that are called


def double(number: int) -> int:
    current = module.current()
    SEEN.append(current.name if current else "")
    return 2 * number


def broken() -> None:
    raise ValueError("broken on purpose\nsecond line")


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def later() -> Future[int]:
    ANSWERS.append(Future())
    return ANSWERS[-1]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def wrong() -> int:
    return 1


@in_turn
def turn() -> str:
    current = module.current()
    return current.name if current else ""


class EndError(Exception):
    """Ends `turns.serve`."""


@in_turn
def end() -> None:
    raise EndError


# ---- calls


def test_a_call_is_a_span_on_both_sides_under_the_callers(trace: Trace, network: list[Any]) -> None:
    SEEN.clear()
    with trace.recorder.span("step") as step:
        assert call(double, 4).wait() == 8
    client, server = trace.pair()
    assert (client.name, client.parent, client.attributes) == ("double", step.id, {"to": "ps 0", "sent": 0})
    assert server.attributes == {"from": "lead 0"}
    assert server.thread != client.thread
    assert SEEN == ["double"]
    assert network == [tracing.serve_traced]
    assert module.current() is None


def test_an_error_passes_and_is_noted_on_both_sides(trace: Trace) -> None:
    with pytest.raises(ValueError, match="broken on purpose"):
        call(broken).wait()
    for span in trace.pair():
        assert span.attributes["error"] == "ValueError: broken on purpose"


def test_an_asynchronous_handler_ends_with_its_answer(trace: Trace, network: list[Any]) -> None:
    answer = call(later)
    assert [span.name for span in trace.spans()] == []
    ANSWERS[-1].set_result(3)
    assert answer.wait() == 3
    client, server = trace.pair()
    assert server.start_ns <= server.attributes["returned_ns"] <= server.end_ns <= client.end_ns
    assert network == [tracing.serve_async]
    failing = call(later)
    ANSWERS[-1].set_exception(ValueError("too late"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too late"):
        failing.wait()
    assert [span.attributes["error"] for span in trace.spans()[-2:]] == ["ValueError: too late"] * 2


def test_an_asynchronous_handler_without_a_future_is_left_to_torch(trace: Trace) -> None:
    assert tracing.serve_async(("", "", "lead 0", None), wrong, ()) == 1
    assert [span.name for span in trace.spans()] == ["wrong"]


def test_a_function_in_turn_runs_in_the_span_of_its_call(trace: Trace) -> None:
    answer, _ = call(turn), call(end)
    with pytest.raises(EndError):
        turns.serve()
    assert answer.wait() == "turn"
    client, server = trace.pair()
    assert client.name == "turn"
    assert server.attributes["returned_ns"] <= server.attributes["began_ns"] <= server.end_ns
    assert module.current() is None


def test_a_call_that_cannot_be_sent_is_a_span_too(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no agent")

    monkeypatch.setattr(rpc, "rpc_async", refuse)
    with pytest.raises(RuntimeError, match="no agent"):
        call(double, 1)
    (span,) = trace.spans()
    assert (span.kind, span.attributes["error"]) == ("client", "RuntimeError: no agent")


def test_while_it_is_off_the_function_itself_is_called(trace: Trace, network: list[Any]) -> None:
    trace.recorder.stop()
    assert call(double, 1).wait() == 2
    assert network == [double]
    # a peer that records calls one that does not
    assert tracing.serve_traced(("0" * 16, "0" * 16, "lead 0", None), double, (1,)) == 2
    assert trace.spans() == []


def test_a_context_has_spans(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolecall.context import context as contexts_module

    context: Context[Any] = contexts.make(tmp_path)
    assert context.span("off", tensor=torch.ones(1)) is NOTHING
    monkeypatch.setattr(contexts_module, "recorder", trace.recorder)
    with context.span("on", shape=torch.ones(2).shape, rows=2) as span:
        span.note(loss=0.5)
    assert trace.spans()[-1].attributes == {"shape": "torch.Size([2])", "rows": 2, "loss": 0.5}


# ---- OpenTelemetry


def parent() -> str:
    """The context that OpenTelemetry has here, and a value of its baggage."""
    import opentelemetry.baggage
    import opentelemetry.trace

    context = opentelemetry.trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x} {context.span_id:016x} {opentelemetry.baggage.get_baggage('tenant')}"


@in_turn
def parent_in_turn() -> str:
    return parent()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("function", [parent, parent_in_turn])
def test_opentelemetrys_context_goes_with_a_call(trace: Trace, function: Callable[[], str], *, recorded: bool) -> None:
    otel = pytest.importorskip("opentelemetry.trace")
    baggage, contexts_of = pytest.importorskip("opentelemetry.baggage"), pytest.importorskip("opentelemetry.context")
    if not recorded:
        trace.recorder.stop()
    span = otel.NonRecordingSpan(otel.SpanContext(0xABC, 0xDEF, is_remote=False))
    before = contexts_of.attach(baggage.set_baggage("tenant", "blue"))
    with otel.use_span(span):
        answer, carried_here = call(function), tracing.Carried()
    contexts_of.detach(before)
    if function is not parent:
        call(end)
        with pytest.raises(EndError):
            turns.serve()
    assert answer.wait() == f"{0xABC:032x} {0xDEF:016x} blue"
    assert carried_here.run(parent, ()) == answer.wait()
    carrier = {"traceparent": f"00-{1:032x}-{2:016x}-01"}
    for serve in (tracing.serve_traced, tracing.serve_async) if recorded else (tracing.serve_traced,):
        assert serve(("", "", "", carrier), parent, ()).startswith(f"{1:032x} {2:016x}")
    assert parent() == f"{0:032x} {0:016x} None"  # nothing is left of any of them
    spans = [span for span in trace.spans() if span.name == function.__name__]
    carried = [(span.trace, span.parent) for span in spans if span.kind == "client"]
    assert carried == ([(f"{0xABC:032x}", f"{0xDEF:016x}")] if recorded else [])


def test_without_opentelemetry_nothing_goes_along(
    trace: Trace, network: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, tracing.OTEL, raising=False)
    trace.recorder.stop()
    assert call(double, 1).wait() == 2
    assert network == [double]
    # a caller's context, where the peer has no OpenTelemetry
    assert tracing.serve_traced(("", "", "", {"traceparent": "00-1-2-00"}), double, (1,)) == 2


# ---- collectives


class Work:
    """A collective under way."""

    def __init__(self, future: Future[Any] | None) -> None:
        self.future = future

    def get_future(self) -> Future[Any]:
        if self.future is None:
            raise RuntimeError("has no future")
        return self.future


def test_collectives_are_spans(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[Any] = Future()
    answers = iter([None, Work(future), Work(None), ValueError("no group"), None])

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name in tracing.COLLECTIVES:
        monkeypatch.setattr(dist, name, all_reduce)
    for _ in range(2):  # the second time changes nothing
        tracing.watch_collectives()
    dist.all_reduce(torch.ones(4))
    (span,) = trace.spans()
    assert (span.name, span.attributes) == ("all-reduce", {"bytes": 16})
    dist.all_reduce(tensor=torch.ones(2), async_op=True)
    assert len(trace.spans()) == 1
    future.set_result(None)
    assert trace.spans()[1].attributes == {"bytes": 8}
    dist.all_reduce(torch.ones(4), async_op=True)
    assert trace.spans()[2].attributes == {"bytes": 16, "end": "not known"}
    with pytest.raises(ValueError, match="no group"):
        dist.all_reduce(torch.ones(4))
    assert trace.spans()[3].attributes["error"] == "ValueError: no group"
    trace.recorder.stop()
    dist.all_reduce(torch.ones(4))
    assert len(trace.spans()) == 4


class Bucket:
    """Gradients, as DistributedDataParallel hands them over."""

    def buffer(self) -> torch.Tensor:
        return torch.tensor([2.0, 4.0])


def test_the_all_reduce_of_hybrids_trainers_is_a_span(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Work:
        future: Future[Any] = Future()
        future.set_result([tensor + 1])  # of the other trainer
        return Work(future)

    for name in tracing.COLLECTIVES:
        monkeypatch.setattr(dist, name, all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    tracing.watch_collectives()
    assert trainer.all_reduce(Bucket()).wait().tolist() == [2.0, 3.0]
    (span,) = trace.spans()
    assert (span.name, span.attributes) == ("all-reduce", {"bytes": 8})
