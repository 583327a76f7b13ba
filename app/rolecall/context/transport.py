"""What carries a group's calls: the wire, with each call counted, timed, watched and traced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rolecall import telemetry
from rolecall.context.progress import ProgressEvent, StepLogged
from rolecall.context.watchdog import Watchdog
from rolecall.declare.task import Peer
from rolecall.errors import UsageError
from rolecall.wire import tracing
from rolecall.wire.calls import Wire
from rolecall.wire.codec import encode, encode_request
from rolecall.wire.future import Future
from rolecall.wire.messages import EXAMINE_SECONDS, Deadline, Forward, Request


class Counters(NamedTuple):
    """The metrics of a method's calls. To look them up by their labels for each call would cost a tenth of it."""

    calls: Any
    failures: Any
    sent_bytes: Any
    received_bytes: Any
    latency_seconds: Any


class Transport:
    """The calls of one worker by its `wire`; `rank0` is rank 0's name. A call by the wire itself is for work in the
    background: it counts neither as one of the job's, nor as what a step does."""

    def __init__(self, wire: Wire, metrics: Any, watchdog: Watchdog, *, rank0: str, rpc_timeout: float) -> None:
        self.wire = wire
        self._metrics, self._watchdog, self._rank0 = metrics, watchdog, rank0
        self._deadline = Deadline(rpc_timeout, f"RPC_TIMEOUT={rpc_timeout:g}")
        self._counters: dict[tuple[str, str], Counters] = {}  # by method and the peer that it was called at
        self._forwarded: Future[None] | None = None
        self.in_flight, self.has_lost, self.on_disconnect = wire.in_flight, wire.has_lost, wire.on_disconnect

    def call(
        self,
        to: str,
        request: Request,
        deadline: Deadline,
        *,
        stream: bool = False,
        waits: bool = True,
        nested: bool = False,
    ) -> Any:
        """Calls a method of the peer `to`; see `Wire.call`. One that is `nested`, of the worker's own services, is a
        part of a call of the role's: it waits for no earlier one, and may run as long."""
        method, watchdog, seconds = request.method, self._watchdog, deadline.total
        if stream:
            request, seconds = request._replace(seconds=0.0), 0.0
        counters = self._counters.get((method, to)) or self._first_call(method, to)
        span = tracing.begin(to, method)
        if header := tracing.header(span):
            request = request._replace(trace=header)
        try:
            content = encode_request(request)
        except Exception as error:  # whatever pickling the arguments raises
            raise UsageError(_unpicklable(to, request, error)) from error
        sent, started = content.nbytes, time.perf_counter()
        if span:
            span.attributes["sent"] = sent
        counters.calls.inc()
        counters.sent_bytes.inc(sent)
        token = watchdog.called(seconds, to, method)

        def ended(_: Any, error: Exception | None, received: int) -> None:
            watchdog.answered(token)
            counters.latency_seconds.observe(time.perf_counter() - started)
            if error is None:
                counters.received_bytes.inc(received)
            else:
                counters.failures.inc()
            if span:
                span.attributes["received"] = received
                span.end(error)

        return self.wire.call(
            to,
            request,
            deadline,
            ended,
            content=content,
            stream=stream,
            urgent=nested,
            waits=waits,
            examined=nested,
        )

    def _first_call(self, method: str, to: str) -> Counters:
        metrics = self._metrics
        telemetry.init_labels(metrics.rpc_failures, [method])
        metrics.rpc_callee.labels(method, to.rpartition("_")[0]).set(1)
        counters = self._counters[method, to] = Counters(
            calls=metrics.rpc_calls.labels(method),
            failures=metrics.rpc_failures.labels(method),
            sent_bytes=metrics.rpc_sent_bytes.labels(method),
            received_bytes=metrics.rpc_received_bytes.labels(method),
            latency_seconds=metrics.rpc_latency_seconds.labels(method),
        )
        return counters

    def lose(self, peer: Peer) -> None:
        """Closes the links to and from `peer`: calls to it fail, and it is not called again unless it joins again."""
        self.wire.lose(peer.name, "it was lost", peer.join)

    def joined(self, peer: Peer) -> None:
        """`peer` is a member now: as a new part of the generation, if it was one before."""
        self.wire.joined(peer.name, peer.join)

    def end_stuck(self, peer: Peer, problem: str, otherwise: Callable[[], None]) -> None:
        """Has the worker of `peer` end as stuck, and loses it. Calls `otherwise` if it cannot be reached."""
        request = Request("end_stuck", (problem,), {}, EXAMINE_SECONDS, internal=True)

        def told(answer: Any) -> None:
            if answer.exception():
                otherwise()
            self.lose(peer)

        self.wire.call(peer.name, request, Deadline(EXAMINE_SECONDS)).add_done_callback(told)

    def forward(self, event: ProgressEvent) -> None:
        """Has rank 0 apply `event` by `Progress.take`, in order: the one before must have been answered. Waits for a
        score, after which the job may end."""
        before, self._forwarded = self._forwarded, None  # one that fails is raised once
        if before is not None:
            before.result()
        request = Request("take_progress", (event,), {}, float(self._deadline), internal=True)
        forwarded = self.wire.call(self._rank0, request, self._deadline)
        if isinstance(event, StepLogged) and event.score is not None:
            forwarded.result()
        else:
            self._forwarded = forwarded


def _unpicklable(to: str, request: Request, error: Exception) -> str:
    """Which argument of a call cannot be pickled, and why."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    args, kwargs = request.args, request.kwargs
    if args and isinstance(args[0], Forward):
        args, kwargs = args[0].args, args[0].kwargs
    named = [(f"argument {number}", value) for number, value in enumerate(args, 1)]
    for name, value in [*named, *((f"argument {name}", value) for name, value in kwargs.items())]:
        try:
            encode(value)
        except Exception:
            return f"{name} of {to}.{request.method} is a {type(value).__name__}, which cannot be pickled: {why}"
    return f"the arguments of {to}.{request.method} cannot be pickled: {why}"
