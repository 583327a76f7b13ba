"""Calls as spans of a trace, at both ends. If the program has imported OpenTelemetry, its context travels with each
call, recorded or not."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rolecall.record.recorder import NOOP, NoopSpan, Span, recorder, under
from rolecall.wire.messages import Carrier, Request, TraceHeader

OTEL = "opentelemetry.trace"  # in sys.modules if the program uses it


# ---- at the caller


def begin(to: str, method: str) -> Span | None:
    """The span of a call to the peer `to`; None while nothing is recorded."""
    return recorder.begin(method, "client", to=to) if recorder.on else None


def header(span: Span | None) -> TraceHeader | None:
    """What the callee is told of `span` and of OpenTelemetry's context, if there are any."""
    carrier = _inject() if OTEL in sys.modules else None
    if span is None:
        return TraceHeader(carrier=carrier) if carrier else None
    if carrier and "traceparent" in carrier:  # the call belongs to the program's trace: W3C Trace Context
        _, span.trace, span.parent, _ = carrier["traceparent"].split("-")
    return TraceHeader(span.id, span.trace, recorder.me, carrier)


# ---- at the callee


_UNRECORDED = contextlib.nullcontext(NOOP)


def serving(request: Request, waited_ns: int = 0) -> contextlib.AbstractContextManager[Span | NoopSpan]:
    """The block carries out `request`, which has waited for its turn for `waited_ns`. What the block raises ends the
    span; otherwise the caller does."""
    return _serving(request, waited_ns) if request.trace or recorder.on else _UNRECORDED


@contextlib.contextmanager
def _serving(request: Request, waited_ns: int) -> Iterator[Span | NoopSpan]:
    parent, trace, caller, carrier = request.trace or TraceHeader()
    token = _attach(carrier) if carrier else None
    span = None
    if recorder.on:
        span = recorder.begin(request.method, "server", parent, trace, **{"from": caller})
        if waited_ns:
            span.start = max(span.start - waited_ns, recorder.started)  # a recording may begin meanwhile
            span.attributes["began_ns"] = time.monotonic_ns()
    try:
        with under(span) if span else contextlib.nullcontext():
            yield span or NOOP
    except Exception as error:
        if span:
            span.end(error)
        raise
    finally:
        if token is not None:
            _context().detach(token)


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
    """Makes the caller's span the parent of OpenTelemetry's spans in this thread."""
    if OTEL not in sys.modules:
        return None
    from opentelemetry import propagate

    return _context().attach(propagate.extract(carrier))
