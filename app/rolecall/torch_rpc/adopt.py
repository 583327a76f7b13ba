"""An unmodified program's `init_rpc` and `init_process_group` meet the members of this generation.

Whatever address such a program names, its own or none, torch's rendezvous answers with the generation's store. Torch's
private names are used here, and in `rpc.py`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from torch.distributed import PrefixStore, Store, rpc  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _rendezvous_handlers

from rolecall import config
from rolecall.config import Settings
from rolecall.record import rundir
from rolecall.torch_rpc.store import is_loopback
from rolecall.torch_rpc.store import opener as store_opener

SCHEMES = ("env", "tcp", "file")
INHERITED = "rolecall"
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_purpose = ContextVar("purpose", default="group")  # of a rendezvous: a process group's, or RPC's


def adopt(settings: Settings, rank: int, world_size: int, generation: int = 0, store: Store | None = None) -> None:
    """Sets torchrun's variables, and from now on torch's own rendezvous is one of the generation's members in `store`:
    that of this process, and of those that it starts with multiprocessing. Without a store, whatever meets raises
    RuntimeError: the program is only loaded.
    """
    values = variables(settings, rank, world_size, generation)
    # torchrun itself has started this rank, and knows its place on the node
    if config.exported("TORCHELASTIC_RUN_ID") and not config.exported("ROLECALL_GENERATION"):
        values = {name: value for name, value in values.items() if name not in LOCAL}
    config.export(**values)
    meet = Rendezvous(store_opener(store, generation) if store is not None else None, rank, world_size)
    _install(meet)
    # multiprocessing passes what is there on to each process that this one starts, and those to theirs
    multiprocessing.current_process()._config[INHERITED] = Inherited(meet)  # type: ignore[attr-defined]


def _install(meet: Rendezvous) -> None:
    for scheme in SCHEMES:
        _rendezvous_handlers[scheme] = meet
    if not hasattr(rpc.init_rpc, "__wrapped__"):
        rpc.init_rpc = _reachable(rpc.init_rpc)


class Inherited:
    """A rendezvous that becomes torch's in the process that unpickles it."""

    def __init__(self, meet: Rendezvous) -> None:
        self._meet = meet

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        _install(self._meet)


def variables(settings: Settings, rank: int, world_size: int, generation: int) -> dict[str, str]:
    """The variables that torchrun sets, and the program's generation and folder. Where rank 0 is at a loopback address
    all ranks are on this machine; otherwise each has one of its own.
    """
    here = is_loopback(settings.master_addr)
    local, local_size, group, groups = (rank, world_size, 0, 1) if here else (0, 1, rank, world_size)
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": groups,
        "ROLE_NAME": "rank",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": settings.master_addr,
        "MASTER_PORT": settings.rank0_port,
        "TORCHELASTIC_RESTART_COUNT": max(generation - 1, 0),
        "TORCHELASTIC_MAX_RESTARTS": settings.max_failures,
        "TORCHELASTIC_RUN_ID": settings.job,
        "ROLECALL_GENERATION": generation,
        "CHECKPOINT_DIR": (settings.checkpoint_dir / rundir.FILES).absolute(),
    }
    return {name: str(value) for name, value in values.items()}


class Rendezvous:
    """A handler of torch's: the members that name the same port (or file) meet, however they name the host.

    Who meets anew under the same URL finds none of the keys from before. `connect` opens the generation's store: each
    meeting has a connection of its own, so that one which waits for a key does not block another. `owner` and `owners`
    are the rank that this process belongs to, and their number.
    """

    def __init__(self, connect: Callable[[], Store] | None, owner: int, owners: int) -> None:
        self._connect, self._owner, self._owners = connect, owner, owners
        self._process = os.getpid()

    def __call__(self, url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Store, int, int]]:
        """The store, rank and world size of one meeting. Raises RuntimeError if another rank's process has met in
        the place of this one.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        rank = int(query.get("rank") or config.exported("RANK"))
        world_size = int(query.get("world_size") or config.exported("WORLD_SIZE"))
        place = parts.path if parts.scheme == "file" else str(parts.port or config.exported("MASTER_PORT"))
        meeting = f"{_purpose.get()}/{parts.scheme}/{place}/{world_size}"
        if self._connect is None:
            raise RuntimeError(f"{url}: a program that is imported meets nobody; do it in a function, or in __main__")
        if os.getpid() != self._process:
            _end_with_parent(os.getpid())
        generation = self._connect()
        if world_size >= self._owners:
            owner = int(generation.compare_set(f"{meeting}/owner-{rank}", "", str(self._owner)))
            if owner != self._owner:
                raise RuntimeError(
                    f"{url}: rank {rank} of {world_size} has met in rank {owner}, and meets in rank {self._owner} too; "
                    "name a program that starts its ranks itself by the function that it starts, FILE.py:FUNCTION"
                )
        number = generation.add(f"{meeting}/times-{rank}", 1)
        store = PrefixStore(f"{meeting}/{number}", generation)
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, rank, world_size


@functools.cache
def _end_with_parent(process: int) -> None:
    """Has `process`, this one, end with the one that started it: no member of a generation outlives its worker."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, name="parent", daemon=True).start()


def _reachable(init_rpc: Callable[..., None]) -> Callable[..., None]:
    """Torch's `init_rpc` over TCP, the one transport that works in a container and notices a peer's end."""

    @functools.wraps(init_rpc)
    def connect(
        name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, rpc_backend_options: Any = None
    ) -> None:
        options = rpc_backend_options
        if options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions):
            options = tcp_options(options or rpc.TensorPipeRpcBackendOptions())
        token = _purpose.set("rpc")
        try:
            init_rpc(name, backend, rank, world_size, options)
        finally:
            _purpose.reset(token)

    return connect


def tcp_options(options: rpc.TensorPipeRpcBackendOptions) -> rpc.TensorPipeRpcBackendOptions:
    """`options` with transports and channels that work between containers."""
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.rpc_timeout,
        init_method=options.init_method,
        device_maps=options.device_maps,  # type: ignore[arg-type]
        devices=options.devices,  # type: ignore[arg-type]
        _transports=["uv"],
        # not cuda_ipc, which aborts if a process does not see the other's GPU
        _channels=["basic", "cuda_basic"] if torch.cuda.is_available() else ["basic"],
    )
