"""torch.distributed.rpc: connect a generation's workers, call with a deadline, count what is called.

A process connects once: workers are fresh processes, and end without a shutdown.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context import meeting
from rolecall.context.context import Context
from rolecall.context.group import EXAMINE_SECONDS
from rolecall.context.progress import ProgressEvent, StepLogged
from rolecall.declare.remote import require_importable
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.record.recorder import recorder
from rolecall.telemetry import Timer
from rolecall.torch_rpc import agent, failures, late, tracing
from rolecall.torch_rpc.failures import Answer, first_line
from rolecall.torch_rpc.reach import TunnelStore
from rolecall.torch_rpc.store import local_address, open_store
from rolecall.tunnel.client import TunnelClient
from rolecall.wire.messages import Deadline, Request

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


def connect(context: Context[Any], directory: Path, tunnel: Path | None = None) -> None:
    """Meets the workers of `context`'s generation, and starts torch's RPC: by way of the rank's `tunnel`, the folder
    with its sockets, if there is one.

    Raises UsageError for a port that stays taken, and PeerLostError if not all members connect in time.
    """
    settings = context.settings
    RankObject.deadline = settings.phase_timeout
    _context.set(context)
    open_tunnel, host = None, settings.bind_addr
    if settings.bind_addr in ("", "0.0.0.0", "::"):
        host = local_address(settings.master_addr)
    if tunnel:
        open_tunnel = partial(TunnelClient, tunnel, context.me.name, host, settings.port)
    context.torch = Torch(context, open_tunnel)
    with Timer() as timer:
        if context.job is None or context.job.rpc:
            _connect_calls(context, directory, open_tunnel, host)
        else:
            context.torch.store()
    context.metrics.rpc_connect_seconds.set(timer.seconds)


@contextlib.contextmanager
def _meeting(context: Context[Any]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"no RPC with all of generation {context.generation}: {first_line(error)}") from error


class Torch:
    """What torch.distributed does in a generation: its store, process groups, RPC. `tunnel` opens a connection to the
    rank's tunnel; None with TLS=off. `ask_port` returns the port of the store that rank 0 has started; it starts the
    store if need be.
    """

    def __init__(self, context: Context[Any], tunnel: Callable[[], TunnelClient] | None) -> None:
        self._context, self._tunnel = context, tunnel
        self.ask_port: Callable[[], int] | None = None
        self._store: Store | None = None
        self._lock = threading.RLock()

    def store(self, port: int | None = None) -> Store:
        """The generation's store. With `port` 0, rank 0 starts it at a free port; without, at the port that all know.

        Raises PeerLostError if it cannot be reached, UsageError for a port that stays taken.
        """
        context = self._context
        with self._lock, _meeting(context):
            if self._store is None:
                if port is None and self.ask_port:
                    port = 0 if context.rank == 0 else self.ask_port()
                reach = self._tunnel() if self._tunnel else None
                store = open_store(
                    context.settings,
                    context.generation,
                    context.me.rank,
                    world_size=len(context.members),
                    reach=reach,
                    rank0=context.members[0].name,
                    port=port,
                )
                self._store = context.store = TunnelStore(store, reach) if reach else store
            return self._store

    def start_store(self) -> int:
        """Starts the store at rank 0. Returns its port."""
        store = self.store(port=0)
        inner: Any = store.inner if isinstance(store, TunnelStore) else store
        return int(inner.underlying_store.port)

    def start_rpc(self, store_port: int) -> None:
        """Starts torch's RPC at all members at once."""
        with _meeting(self._context):
            agent.start(self._context, self.store(port=store_port))
            rpc._set_rpc_timeout(self._context.settings.rpc_timeout)  # type: ignore[attr-defined]

    def reference(self, to: Peer | str) -> rpc.RRef[Any]:
        """See `Context.reference`."""
        name = to if isinstance(to, str) else to.name
        return rpc.remote(name, _role_object)  # type: ignore[no-any-return]

    def join_group(self, role: str, timeout: float) -> None:
        """See `Context.join_group`."""
        context = self._context
        store, members = PrefixStore(f"group-{role}", self.store()), context.peers(role)
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


def _role_object() -> Any:
    """Runs at the owner: the object of its role."""
    return _context.get().role_object()


def _connect_calls(
    context: Context[Any], directory: Path, tunnel: Callable[[], TunnelClient] | None, host: str
) -> None:
    with_rpc = context.job is not None and context.job.uses_torch_rpc(context.settings)
    wire, store_port = meeting.meet(
        context,
        directory=directory,
        tunnel=tunnel,
        host=host,
        open_store=context.torch.start_store,
        with_store=with_rpc,
    )
    rank0, seconds = context.rank0.name, context.settings.connect_timeout

    def ask_port() -> int:
        ask = Request("store_port", (), {}, seconds, internal=True)
        return int(wire.call(rank0, ask, Deadline(seconds, f"CONNECT_TIMEOUT={seconds:g}")).result())

    context.torch.ask_port = ask_port
    if with_rpc:
        context.torch.start_rpc(store_port)
        context.group.functions = TorchRpc(context, context.store)


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
