"""torch.distributed.rpc: connect a generation's workers, call with a deadline, count what is called.

A process connects once: workers are fresh processes, and end without a shutdown.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.context.group import EXAMINE_SECONDS
from rolecall.context.progress import ProgressEvent, StepLogged
from rolecall.context.watchdog import Deadline
from rolecall.declare.remote import require_importable
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.record.recorder import recorder
from rolecall.telemetry import Timer
from rolecall.torch_rpc import agent, failures, late, tracing
from rolecall.torch_rpc.failures import Answer, first_line
from rolecall.torch_rpc.reach import Reach, TunnelStore
from rolecall.torch_rpc.store import local_address, open_store

T = TypeVar("T")
_threads = threading.local()
_staying: list[torch.futures.Future[None]] = []  # calls of `on_disconnect` that are served here


class RankObject(Generic[T]):
    """The object that calls to this rank act on: `set` by the role's function, found with `get` by the called ones.

    RPC serves from the moment it connects, so the first call may arrive before the role's function has begun.
    """

    deadline = float(Settings.model_fields["phase_timeout"].default)  # seconds; `connect` sets the generation's own

    def __init__(self) -> None:
        self._future: Future[T] = Future()

    def set(self, value: T) -> T:
        """Sets the object, once, and returns it. A rank other than rank 0 is no longer loading then."""
        self._future.set_result(value)
        if self is not _context and _context._future.done() and (context := _context._future.result()).rank:
            context.watchdog.ready()
        return value

    def get(self) -> T:
        """The object. Raises PeerLostError if it is not set within PHASE_TIMEOUT."""
        keep_thread()
        try:
            return self._future.result(self.deadline)
        except TimeoutError:
            raise PeerLostError(f"this rank was not ready within PHASE_TIMEOUT={self.deadline:g} s") from None


_context: RankObject[Context[Any]] = RankObject()


def is_rank0() -> bool:
    """Whether this process is the worker of rank 0."""
    return _context._future.done() and _context._future.result().rank == 0


def connect(context: Context[Any], tunnel: Path | None = None) -> None:
    """Joins the store of `context`'s generation and, unless the job has none, its RPC, the context's transport: by way
    of the rank's `tunnel`, the folder with its sockets, if there is one.

    Raises UsageError for a port that stays taken, and PeerLostError if not all members connect in time.
    """
    settings = context.settings
    RankObject.deadline = settings.phase_timeout
    _context.set(context)
    with Timer() as timer:
        try:
            rank0, reach = context.members[0].name, None
            if tunnel:
                everywhere = settings.bind_addr in ("", "0.0.0.0", "::")
                host = local_address(settings.master_addr) if everywhere else settings.bind_addr
                reach = Reach(tunnel, context.me.name, host, settings.port)
            me = context.me.rank
            store = open_store(
                settings, context.generation, me, world_size=len(context.members), reach=reach, rank0=rank0
            )
            if reach:
                store = TunnelStore(store, reach)
            context.store = store
            if context.job is not None and not context.job.rpc:
                return
            context.transport = TorchRpc(context, store)
            agent.start(context, store)
        except (RuntimeError, dist.DistError) as error:
            raise PeerLostError(f"no RPC with all of generation {context.generation}: {first_line(error)}") from error
    rpc._set_rpc_timeout(settings.rpc_timeout)  # type: ignore[attr-defined]
    context.metrics.rpc_connect_seconds.set(timer.seconds)


class TorchRpc:
    """Calls over torch's TensorPipe."""

    def __init__(self, context: Context[Any], store: Store) -> None:
        self._context, self._store = context, store
        self._metrics, self._watchdog = context.metrics, context.watchdog
        self._methods: set[str] = set()  # that were called
        self._callees: set[tuple[str, str]] = set()  # with the peers that they were called at
        self._forwarded: Answer | None = None

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: Deadline) -> Answer:
        """See `Context.call`."""
        method, metrics, watchdog = getattr(function, "__name__", ""), self._metrics, self._watchdog
        if method not in self._methods:
            require_importable(function)
            self._methods.add(method)
            telemetry.begin(metrics.rpc_failures, [method])
        if (method, to) not in self._callees:
            self._callees.add((method, to))
            metrics.rpc_callee.labels(method, to.rpartition("_")[0]).set(1)
        started = time.perf_counter()
        sent = payload_bytes(args)
        metrics.rpc_calls.labels(method).inc()
        metrics.rpc_sent_bytes.labels(method).inc(sent)
        token = watchdog.called(timeout, to, method)
        span = tracing.begin(to, method, sent)
        answer = self._answer(to)

        def count(value: Any, error: Exception | None) -> None:
            metrics.rpc_latency_seconds.labels(method).observe(time.perf_counter() - started)
            if error is None:
                received = payload_bytes(value)
                metrics.rpc_received_bytes.labels(method).inc(received)
                if span is not None:
                    span.attributes["received"] = received
            else:
                metrics.rpc_failures.labels(method).inc()
                if span is not None:
                    span.fail(error)
            if span is not None:
                span.end()

        def done(answered: torch.futures.Future[Any]) -> None:
            keep_thread()
            value, error = None, None
            try:
                value = answered.value()
            except Exception as raised:  # whoever waits for the answer gets it
                error = failures.failure(raised, to, method, timeout)
            watchdog.answered(token, to if error is None else "")
            try:
                count(value, error)
            finally:
                if error is None:
                    answer.set_result(value)
                else:
                    self._fail(answer, error, to, method, timeout)

        tracing.send(to, function, args, timeout, span).add_done_callback(done)
        return answer

    def _answer(self, to: str) -> Answer:
        """The answer of a call to the peer `to`, which may have CUDA tensors in it."""
        context = self._context
        return Answer(devices=[torch.device("cuda", 0)]) if to in context.mapped else Answer()

    def _fail(self, answer: Answer, error: Exception, to: str, method: str, deadline: Deadline) -> None:
        """Gives `answer` the `error` with which a call ended; one that is late is looked into before."""
        here = self._context.me.name
        if isinstance(error, CallTimeoutError) and not failures.is_remote(error):
            late.examine(to, method, deadline, error, lambda examined: answer.fail(examined, here))
            return
        try:
            if isinstance(error, PeerLostError) and not failures.is_remote(error):
                self._context.group.disconnected(to, error)
        finally:
            answer.fail(error, here)

    def wait_all(self, calls: list[torch.futures.Future[Any]]) -> list[Any]:
        """See `Context.wait_all`."""
        ended: queue.SimpleQueue[torch.futures.Future[Any]] = queue.SimpleQueue()
        for call in calls:
            call.add_done_callback(ended.put)
        for _ in calls:
            with recorder.span("wait"):
                first = ended.get()  # each ends at its own deadline
            first.value()
        return [call.value() for call in calls]

    @staticmethod
    def end_stuck(to: str, problem: str, otherwise: Callable[[], None]) -> None:
        """Has the peer `to` end as one that is stuck, as `problem` says; calls `otherwise` if it cannot be told."""

        def told(answered: torch.futures.Future[None]) -> None:
            try:
                answered.value()
            except Exception:  # of any kind
                otherwise()

        try:
            rpc.rpc_async(to, _end_stuck, args=(problem,), timeout=EXAMINE_SECONDS).add_done_callback(told)
        except RuntimeError:  # its connection is gone
            otherwise()

    def on_disconnect(self, to: str, gone: Callable[[str], None]) -> None:
        """See `Context.on_disconnect`."""
        # no deadline: the answer never comes, the call fails with the connection
        rpc.rpc_async(to, _stay, timeout=0).add_done_callback(lambda _: gone(to))

    def join_group(self, context: Context[Any], role: str, timeout: float) -> None:
        """See `Context.join_group`."""
        store, members = PrefixStore(f"group-{role}", self._store), context.peers(role)
        place, device = members.index(context.me), context.device
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        try:
            store.set(f"gpu-{place}", gpu)
            gpus = {store.get(f"gpu-{number}") for number in range(len(members))}
            backend = "nccl" if len(gpus) == len(members) and b"" not in gpus else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place, world_size=len(members), timeout=timedelta(seconds=timeout)
            )
        except (RuntimeError, dist.DistError) as error:
            raise PeerLostError(f"no process group with all of {role}: {first_line(error)}") from error

    def forward(self, event: ProgressEvent) -> None:
        """Has rank 0 apply `event`, in order: the one before must have been answered. Waits for a score, after which
        the job may end.
        """
        if self._forwarded is not None:
            self._forwarded.wait()
        rank0, limit = self._context.members[0].name, self._context.settings.rpc_timeout
        deadline, answer = Deadline(limit, f"RPC_TIMEOUT={limit:g}"), Answer()

        def done(answered: torch.futures.Future[None]) -> None:
            try:
                answered.value()
            except Exception as error:  # whoever waits gets it
                self._fail(answer, failures.failure(error, rank0, "log", deadline), rank0, "log", deadline)
            else:
                answer.set_result(None)

        tracing.call(rank0, _take_progress, (event,)).add_done_callback(done)
        self._forwarded = answer
        if isinstance(event, StepLogged) and event.score is not None:
            self._forwarded.wait()


def _end_stuck(problem: str) -> None:
    _context.get().supervision.report_stuck(problem)


def _take_progress(event: ProgressEvent) -> None:
    """Runs at rank 0."""
    _context.get().progress.take(event)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _stay() -> torch.futures.Future[None]:
    _staying.append(torch.futures.Future())
    return _staying[-1]


def keep_thread() -> None:
    """Keeps the Python thread state of this RPC thread for as long as the thread lives.

    Otherwise every call into Python makes a new state and unmaps it again, a tenth of the time of a short call.
    """
    if not getattr(_threads, "kept", False):
        _threads.kept = True
        ctypes.pythonapi.PyGILState_Ensure()  # without its counterpart


def payload_bytes(value: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in `value`, which make up most of a message."""
    match value:
        case torch.Tensor():
            return value.numel() * value.element_size()
        case bytes():
            return len(value)
        case list() | tuple():
            return sum(map(payload_bytes, value))
        case dict():
            return sum(map(payload_bytes, value.values()))
        case _ if is_dataclass(value) and not isinstance(value, type):
            return sum(payload_bytes(getattr(value, field.name)) for field in fields(value))
        case _:
            return int(getattr(value, "nbytes", 0))
