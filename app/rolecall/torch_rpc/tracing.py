"""Remote calls, waits for their answers, and collectives as spans of a trace.

While this rank records, a call runs `serve_traced` at the peer, with its span. If the program has imported
OpenTelemetry, its context is passed along with each call, recorded or not.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.declare.task import Peer
from rolecall.record.recorder import Span, current, recorder, under
from rolecall.torch_rpc.failures import remote_failure

OTEL = "opentelemetry.trace"  # in sys.modules if the program uses it
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
}
Answer = torch.futures.Future[Any]
Carrier = dict[str, str]  # a context, written by OpenTelemetry's propagators
Header = tuple[str, str, str, Carrier | None]  # of a call: its span, the span's trace, the caller's name, the carrier


def record(job: str, me: Peer, generation: int, path: Path, seconds: float | None) -> None:
    """Makes this process record to `path` for `seconds`, or to its end. A file that cannot be written is logged."""
    about = {"job": job, "role": me.role, "ordinal": me.ordinal, "rank": me.rank, "generation": generation}
    try:
        recorder.start(path, about, seconds)
    except (OSError, RuntimeError) as error:  # no space, no thread
        telemetry.log().warning("no trace can be recorded", problem=str(error))
    watch_collectives()
    watch_waits()


def flush() -> None:
    """Writes the recorded spans before this process ends."""
    try:
        recorder.flush()
    except Exception as error:  # whatever it is, the process's result follows
        telemetry.log().warning("the trace cannot be written to its end", problem=str(error) or type(error).__name__)


# ---- at the caller


def begin(to: str, method: str, sent: int) -> Span | None:
    """The span of a call to the peer `to` with `sent` bytes; None while nothing is recorded."""
    return recorder.begin(method, "client", to=" ".join(to.rsplit("_", 1)), sent=sent) if recorder.on else None


def send(to: str, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, span: Span | None) -> Answer:
    """torch's `rpc_async`, with `span` and OpenTelemetry's context, if there are any."""
    carrier = _inject() if OTEL in sys.modules else None
    if span is None and carrier is None:
        return rpc.rpc_async(to, function, args=args, timeout=timeout)  # type: ignore[no-any-return]
    header: Header = ("", "", recorder.me, carrier)
    if span is not None:
        if carrier and "traceparent" in carrier:  # the call belongs to the program's trace: W3C Trace Context
            _, span.trace, span.parent, _ = carrier["traceparent"].split("-")
        header = (span.id, span.trace, recorder.me, carrier)
    # torch asks the caller whether the function's answer is a future
    serve = serve_async if hasattr(function, "_wrapped_async_rpc_function") else serve_traced
    try:
        return rpc.rpc_async(to, serve, args=(header, function, args), timeout=timeout)  # type: ignore[no-any-return]
    except Exception as error:
        if span is not None:
            span.fail(error)
            span.end()
        raise


def call(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Answer:
    """A call that is recorded, and that no metric counts."""
    span = begin(to, function.__name__, 0)
    answer = send(to, function, args, -1.0, span)
    if span is not None:
        answer.add_done_callback(functools.partial(_end, span))
    return answer


def _end(span: Span, answer: Answer) -> None:
    try:
        answer.value()
    except Exception as error:  # whoever waits for the future gets it
        span.fail(remote_failure(error) or error)
    span.end()


# ---- at the peer


def serve_traced(header: Header, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs `function` in the span of the call."""
    parent, trace, caller, carrier = header
    token = _attach(carrier) if carrier else None
    try:
        if not recorder.on:
            return function(*args)
        with _server_span(function, parent, trace, caller):
            return function(*args)
    finally:
        _detach(token)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def serve_async(header: Header, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs `function`, which returns a future: the span ends with that."""
    parent, trace, caller, carrier = header
    token = _attach(carrier) if carrier else None
    try:
        if not recorder.on:
            return function(*args)
        span = _server_span(function, parent, trace, caller)
        try:
            with under(span):
                answer = function(*args)
        except Exception as error:
            span.fail(error)
            span.end()
            raise
    finally:
        _detach(token)
    span.attributes["returned_ns"] = time.monotonic_ns()
    if isinstance(answer, torch.futures.Future):
        answer.add_done_callback(functools.partial(_end, span))
    else:
        span.end()  # torch says what is wrong
    return answer


def _server_span(function: Callable[..., Any], parent: str, trace: str, caller: str) -> Span:
    return recorder.begin(getattr(function, "__name__", ""), "server", parent, trace, **{"from": caller})


class Carried:
    """The span that this thread is in, and OpenTelemetry's context, for a function that another thread runs later."""

    def __init__(self) -> None:
        self._span, self._context = current(), _context().get_current() if OTEL in sys.modules else None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs `function` in them. The span says when that was."""
        token = None if self._context is None else _context().attach(self._context)
        if self._span is not None:
            self._span.attributes["began_ns"] = time.monotonic_ns()
        try:
            with under(self._span):
                return function(*args)
        finally:
            _detach(token)


def carry() -> Carried | None:
    """The span and context for a function that runs later in another thread, if there are any."""
    return Carried() if recorder.on or OTEL in sys.modules else None


# ---- OpenTelemetry


def _context() -> Any:
    from opentelemetry import context  # optional: only if the program uses it

    return context


def _inject() -> Carrier | None:
    """OpenTelemetry's context, if the program is in a span of its own."""
    if not sys.modules[OTEL].get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import propagate

    carrier: Carrier = {}
    propagate.inject(carrier)
    return carrier


def _attach(carrier: Carrier) -> Any:
    """Has OpenTelemetry's spans in this thread be children of the caller's; returns what `_detach` takes."""
    if OTEL not in sys.modules:
        return None
    from opentelemetry import propagate

    return _context().attach(propagate.extract(carrier))


def _detach(token: Any) -> None:
    if token is not None:
        _context().detach(token)


# ---- collectives


def watch_collectives() -> None:
    """Makes torch's collectives spans while this rank records."""
    for function, name in COLLECTIVES.items():
        original = getattr(dist, function)
        if not hasattr(original, "traced"):
            setattr(dist, function, _collective(original, name))


def _collective(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any, **values: Any) -> Any:
        if not recorder.on:
            return function(*args, **values)
        tensors = (each for each in (*args, *values.values()) if isinstance(each, torch.Tensor))
        span = recorder.begin(name, bytes=sum(each.nbytes for each in tensors))
        try:
            work = function(*args, **values)
        except Exception as error:
            span.fail(error)
            span.end()
            raise
        if work is None:
            span.end()
        else:
            _end_with(work, span)
        return work

    traced.traced = True  # type: ignore[attr-defined]
    return traced


def _end_with(work: Any, span: Span) -> None:
    """Ends `span` with an asynchronous collective."""
    try:
        work.get_future().add_done_callback(lambda _: span.end())
    except RuntimeError:  # of a backend, or a collective, without futures
        span.attributes["end"] = "not known"
        span.end()


# ---- waits


def watch_waits() -> None:
    """Records the waits for torch's futures, which tell a call that is waited for from one beside other work."""
    # the class of what `rpc_async` and `collect_all` return; that of torch.futures is derived from it
    future: Any = torch._C.Future
    original = future.wait
    if hasattr(original, "traced"):
        return

    @functools.wraps(original)
    def wait(self: Any) -> Any:
        if not recorder.on or self.done():
            return original(self)
        start = time.monotonic_ns()
        try:
            return original(self)
        finally:
            recorder.since(start, "wait")

    wait.traced = True  # type: ignore[attr-defined]
    future.wait = wait
