"""A worker's RPC agent, which connects to a peer at the first call between them.

Torch's own start of an agent meets in a gloo process group first, in which all ranks connect with all: to exchange the
maps of CUDA devices, and to wait for each other. Here both go through the generation's store.
"""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc import api, backend_registry

from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.torch_rpc.store import is_loopback
from rolecall.wire import memory
from rolecall.wire.memory import Region

NAME = "ROLECALL"
RPC_THREADS = 16  # of a worker: they serve incoming calls, and receive the answers of its outgoing ones
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def start(context: Context[Any], store: Store) -> None:
    """Starts the agent of this process, which has none yet, and waits until every member of the generation has.

    Raises RuntimeError and torch's DistError if not all start within CONNECT_TIMEOUT.
    """
    rank, world_size = context.me.rank, len(context.members)
    register_rendezvous_handler(NAME.lower(), lambda url, **_: iter([(store, rank, world_size)]))
    options = _options(context, store)
    backend = backend_registry.register_backend(NAME, lambda *_, **__: options, _start)
    rpc.init_rpc(context.me.name, backend=backend, rank=rank, world_size=world_size, rpc_backend_options=options)


def _start(
    store: Store, name: str, rank: int, world_size: int, rpc_backend_options: rpc.TensorPipeRpcBackendOptions
) -> Any:
    """What torch calls for the backend `NAME`."""
    maps: dict[str, Any] = rpc_backend_options.device_maps
    # a peer maps its devices as this rank does
    backwards = {peer: {there: here for here, there in devices.items()} for peer, devices in maps.items()}
    devices = sorted({here for devices in maps.values() for here in devices}, key=str)
    if devices:
        torch.cuda.init()  # a call with CUDA tensors may come before this process uses CUDA itself
    options = (rpc_backend_options, backwards, devices)  # whose names differ between torch and its stubs
    agent = rpc.TensorPipeAgent(store, name, rank, world_size, *options)  # type: ignore[attr-defined]
    api._init_rpc_states(agent)
    store.set(f"ready-{rank}", "")
    # one key to wait for, set by one rank: all waiting for all would be quadratic
    if rank == 0:
        store.wait(
            [f"ready-{member}" for member in range(world_size)], timedelta(seconds=rpc_backend_options.rpc_timeout)
        )
        store.set("all-ready", "")
    store.wait(["all-ready"], timedelta(seconds=rpc_backend_options.rpc_timeout))
    return agent


def channels(settings: Settings, device: str, yama: Path = YAMA) -> list[str]:
    """What TensorPipe may send tensors by. Between processes of one machine and user that is `cma`: the receiver copies
    them from the sender's memory (process_vm_readv), past sockets and tunnels. If the two cannot, it takes `basic`.
    """
    if device == "cuda":
        return ["basic", "cuda_basic"]  # not cuda_ipc, which aborts if a process does not see the other's GPU
    # elsewhere ranks may share a machine but not its network, which a link between them is to be measured through
    if settings.tls == "always" or not is_loopback(settings.master_addr):
        return ["basic"]
    # if Yama restricts ptrace, TensorPipe would open this process to every other one of its user
    try:
        allowed = not yama.exists() or yama.read_text().strip() == "0"
    except OSError:  # a container may not see it
        allowed = False
    return ["cma", "basic"] if allowed and reads_memory() else ["basic"]


def reads_memory() -> bool:
    """Whether this process may copy memory of another, its parent, which a container's system call filter or a
    security module can forbid.
    """
    try:
        memory.read(os.getppid(), Region(0, 1))
    except OSError as error:
        return error.errno == errno.EFAULT  # nothing is at address 0; a refusal comes before that
    return False


def _options(context: Context[Any], store: Store) -> rpc.TensorPipeRpcBackendOptions:
    """RPC's options. If two ranks compute with CUDA, tensors go from the one's first GPU to the other's."""
    device = context.device.type
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{NAME.lower()}://",
        num_worker_threads=RPC_THREADS,
        rpc_timeout=context.settings.connect_timeout,
        _transports=["uv"],
        _channels=channels(context.settings, device),
    )
    store.set(f"device-{context.me.rank}", device)
    for peer in context.members if device == "cuda" else ():
        if peer != context.me and store.get(f"device-{peer.rank}") == b"cuda":
            options.set_device_map(peer.name, {0: 0})
            context.torch.mapped.add(peer.name)
    return options
