"""Jobs whose ranks have no line of tracing in their calls, their steps and their phases: what bench_trace compares
with. `JOB=bench.untraced:PS` and so on; the import replaces the methods in this process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.context.watchdog import Deadline, Entry, Watchdog
from rolecall.declare import registry
from rolecall.declare.remote import require_importable
from rolecall.torch_rpc import failures, tracing
from rolecall.torch_rpc.rpc import TorchRpc, keep_thread, payload_bytes

PS, RNN, RL = (registry.get(name) for name in ("ps", "rnn", "rl"))


def call(self: Any, to: str, function: Callable[..., Any], *args: Any, timeout: Deadline) -> Any:
    """`TorchRpc.call` without what tracing added."""
    method, metrics, calls = getattr(function, "__name__", ""), self._metrics, self._watchdog
    if method not in self._methods:
        require_importable(function)
        self._methods.add(method)
        telemetry.begin(metrics.rpc_failures, [method])
    if (method, to) not in self._callees:
        self._callees.add((method, to))
        metrics.rpc_callee.labels(method, to.rpartition("_")[0]).set(1)
    started = time.perf_counter()
    metrics.rpc_calls.labels(method).inc()
    metrics.rpc_sent_bytes.labels(method).inc(payload_bytes(args))
    token = calls.called(timeout, to, method)
    answer = self._answer(to)

    def count(value: Any, error: Exception | None) -> None:
        metrics.rpc_latency_seconds.labels(method).observe(time.perf_counter() - started)
        if error is None:
            metrics.rpc_received_bytes.labels(method).inc(payload_bytes(value))
        else:
            metrics.rpc_failures.labels(method).inc()

    def done(answered: torch.futures.Future[Any]) -> None:
        keep_thread()
        value, error = None, None
        try:
            value = answered.value()
        except Exception as raised:
            error = failures.failure(raised, to, method, timeout)
        calls.answered(token, to if error is None else "")
        try:
            count(value, error)
        finally:
            if error is None:
                answer.set_result(value)
            else:
                self._fail(answer, error, to, method, timeout)

    rpc.rpc_async(to, function, args=args, timeout=timeout).add_done_callback(done)
    return answer


@contextlib.contextmanager
def phase(self: Any, name: Any) -> Iterator[None]:
    """`Watchdog.phase`."""
    entry = Entry(name, self._clock(), threading.get_ident())
    with self._lock:
        self._phases.append(entry)
    try:
        yield
    finally:
        with self._lock:
            self._phases.remove(entry)
            self._since = self._began = self._clock()


@contextlib.contextmanager
def step(self: Any, number: int) -> Iterator[None]:
    """`Watchdog.step`."""
    self.begin(number)
    try:
        yield
    except BaseException:
        self.idle()
        raise


def remove() -> None:
    """Takes tracing out of this process."""
    TorchRpc.call = call  # type: ignore[method-assign]
    Watchdog.phase, Watchdog.step = phase, step  # type: ignore[method-assign]
    tracing.carry = lambda: None


remove()
