"""torch.distributed.rpc: connect a generation's workers, call with a deadline, count what is called.

The only file that initialises RPC. A process connects once: workers are fresh processes, and end without a shutdown.
"""

from __future__ import annotations

import ctypes
import errno
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from rolecall import config, telemetry
from rolecall.config import Settings, UsageError
from rolecall.job.context import Context
from rolecall.telemetry import Timer

SCHEME = "rolecall"
# what torch says, without a type of its own, of a peer whose connection broke or whose answer did not come in time
GONE = re.compile(r"originated at tensorpipe|RPCErr:1:|gloo/transport/|ncclRemoteError")
_metrics: Any = None
_methods: set[str] = set()  # that were called
_threads = threading.local()
_rendezvous: Store | None = None
_staying: list[torch.futures.Future[None]] = []  # calls of `watch` that are here


class PeerLostError(RuntimeError):
    """A peer that this rank cannot do without is gone or silent; the gang regroups, it is no failure of this rank."""


def is_lost(error: BaseException) -> bool:
    """Whether `error` says that a peer is gone or silent, here or at a peer that was called."""
    return isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and bool(GONE.search(str(error))))


def connect(context: Context) -> None:
    """Join the RPC of `context`'s generation. Raises UsageError for a port that stays taken, PeerLostError too late.

    The rendezvous is a store that lives in rank 0's worker. Its keys carry the generation's number, so a worker that
    comes too late, from a generation that is over, meets nobody.
    """
    global _metrics, _rendezvous
    _metrics = context.metrics
    settings = context.settings
    config.export(**dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), interface(settings.master_addr)))
    # init_rpc gathers device maps through a backend of its own that torch itself warns of
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    with Timer() as timer:
        try:
            store = _rendezvous = _store(context)
            register_rendezvous_handler(SCHEME, lambda url, **_: iter([(store, context.me.rank, len(context.members))]))
            options = _options(context, store)
            rpc.init_rpc(
                context.me.name, rank=context.me.rank, world_size=len(context.members), rpc_backend_options=options
            )
        except (RuntimeError, dist.DistError) as error:
            raise PeerLostError(f"no RPC with all of generation {context.generation}: {first_line(error)}") from error
    rpc._set_rpc_timeout(settings.rpc_timeout)  # type: ignore[attr-defined]
    _metrics.rpc_connect_seconds.set(timer.seconds)


def _options(context: Context, store: Store) -> rpc.TensorPipeRpcBackendOptions:
    """RPC's options. Where two ranks compute with CUDA, tensors go from the one's first GPU to the other's."""
    cuda = context.device.type == "cuda"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{SCHEME}://",
        num_worker_threads=16,
        rpc_timeout=context.settings.connect_timeout,
        _transports=["uv"],
        # not cuda_ipc, which aborts where a process does not see the other's GPU
        _channels=["basic", "cuda_basic"] if cuda else ["basic"],
    )
    store.set(f"device-{context.me.rank}", context.device.type)
    for peer in context.members if cuda else ():
        if peer != context.me and store.get(f"device-{peer.rank}") == b"cuda":
            options.set_device_map(peer.name, {0: 0})
            context.mapped.add(peer.name)
    return options


def join_group(context: Context, role: str, timeout: float) -> None:
    """Make torch's default process group, of the members with `role`: all of them call this, after `connect`.

    Collectives have `timeout` seconds. NCCL where each has a GPU of its own, gloo otherwise. Raises PeerLostError.
    """
    assert _rendezvous is not None
    store, members = PrefixStore(f"group-{role}", _rendezvous), context.peers(role)
    place = members.index(context.me)
    own = str(torch.cuda.get_device_properties(context.device).uuid) if context.device.type == "cuda" else ""
    try:
        store.set(f"gpu-{place}", own)
        gpus = {store.get(f"gpu-{number}") for number in range(len(members))}
        backend = "nccl" if len(gpus) == len(members) and b"" not in gpus else "gloo"
        dist.init_process_group(
            backend, store=store, rank=place, world_size=len(members), timeout=timedelta(seconds=timeout)
        )
    except (RuntimeError, dist.DistError) as error:
        raise PeerLostError(f"no process group with all of {role}: {first_line(error)}") from error


def _store(context: Context) -> Store:
    settings = context.settings
    timeout = timedelta(seconds=settings.connect_timeout)
    size = len(context.members)
    if context.me.rank == 0:
        listener = _listen(settings)
        store = TCPStore(
            settings.master_addr,
            settings.master_port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    else:
        _await_listener(settings)
        store = TCPStore(
            settings.master_addr, settings.master_port, size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    return PrefixStore(f"generation-{context.generation}", store)


def _listen(settings: Settings) -> socket.socket:
    # sooner than the others give rank 0 up: its own line names the setting
    end = time.monotonic() + settings.connect_timeout / 2
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.bind_addr, settings.master_port))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                where = f"{settings.bind_addr} ({error.strerror})"
                raise UsageError(
                    f"MASTER_PORT={settings.master_port}: cannot listen on it at {where}; choose another"
                ) from error
            time.sleep(0.1)  # a port has no event for becoming free


def _await_listener(settings: Settings) -> None:
    """Wait until rank 0's worker listens: refused, the store's own client waits a second before it tries again."""
    end = time.monotonic() + settings.connect_timeout
    while True:
        try:
            socket.create_connection((settings.master_addr, settings.master_port), settings.connect_timeout).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                where = f"{settings.master_addr}:{settings.master_port}"
                raise PeerLostError(f"rank 0's worker cannot be reached at {where}: {error}") from error
            time.sleep(0.02)  # another machine's port has no event for becoming open


def interface(address: str) -> str:
    """The name of the network interface that routes to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise PeerLostError(f"MASTER_ADDR={address} cannot be resolved or routed to: {error.strerror}") from error
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == own for found in addresses):
            return str(name)
    raise PeerLostError(f"MASTER_ADDR={address}: no interface has the address {own}")


def keep_thread() -> None:
    """Let this thread of RPC's keep its Python state, for as long as it lives.

    Otherwise every call into Python makes one anew and unmaps it again: a tenth of the time of a short call.
    """
    if not getattr(_threads, "kept", False):
        _threads.kept = True
        ctypes.pythonapi.PyGILState_Ensure()  # without its counterpart


def call(to: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> torch.futures.Future[Any]:
    """Call `function(*args)` at the worker `to`; the future raises where the call fails or `timeout` seconds pass.

    `timeout` -1 means RPC_TIMEOUT. The call is counted and timed under the function's name.
    """
    method = function.__name__
    if method not in _methods:
        _methods.add(method)
        telemetry.begin(_metrics.rpc_failures, [method])
    started = time.perf_counter()
    _metrics.rpc_calls.labels(method).inc()
    _metrics.rpc_sent_bytes.labels(method).inc(payload_bytes(args))
    future: torch.futures.Future[Any] = rpc.rpc_async(to, function, args=args, timeout=timeout)

    def done(answered: torch.futures.Future[Any]) -> None:
        keep_thread()
        _metrics.rpc_latency_seconds.labels(method).observe(time.perf_counter() - started)
        try:
            received = payload_bytes(answered.value())
        except Exception:  # whatever the call raised, its waiter hears of it; here it only counts
            _metrics.rpc_failures.labels(method).inc()
        else:
            _metrics.rpc_received_bytes.labels(method).inc(received)

    future.add_done_callback(done)
    return future


def watch(to: str, gone: Callable[[str], None]) -> None:
    """Call `gone(to)`, from another thread, as soon as the worker `to` has ended or its connection broke.

    For a peer that is not called while it works. One that falls silent is the gang's to notice.
    """
    # no deadline: nobody waits for the answer, which never comes; the call fails with the connection
    rpc.rpc_async(to, _stay, timeout=0).add_done_callback(lambda _: gone(to))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _stay() -> torch.futures.Future[None]:
    _staying.append(torch.futures.Future())
    return _staying[-1]


def payload_bytes(value: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in `value`: what weighs in a message."""
    match value:
        case torch.Tensor():
            return value.numel() * value.element_size()
        case bytes():
            return len(value)
        case list() | tuple():
            return sum(map(payload_bytes, value))
        case dict():
            return sum(map(payload_bytes, value.values()))
        case _:
            return int(getattr(value, "nbytes", 0))


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
