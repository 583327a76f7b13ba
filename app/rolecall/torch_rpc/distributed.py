"""Connects a worker to its generation: by the wire and, if it is needed, by what torch.distributed does in it.

A process connects once for each of its parts in a generation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rolecall.context import meeting
from rolecall.context.context import Context
from rolecall.errors import PeerLostError
from rolecall.torch_rpc.failures import first_line
from rolecall.torch_rpc.reach import TunnelStore
from rolecall.torch_rpc.store import local_address, open_store
from rolecall.tunnel.client import TunnelClient
from rolecall.wire.messages import Deadline, Request
from rolecall.wire.session import Session


@contextlib.contextmanager
def _meeting(context: Context[Any]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"no store with all of generation {context.generation}: {first_line(error)}") from error


class Torch:
    """What torch.distributed does in a generation: its store, and process groups.

    `tunnel` opens a connection to the rank's tunnel; it is None with TLS=off. `store` is one that is open already.
    `ask_port` returns the port of the store that rank 0 has started; it starts the store if need be.
    """

    def __init__(
        self, context: Context[Any], tunnel: Callable[[], TunnelClient] | None, store: Store | None = None
    ) -> None:
        self._context, self._tunnel = context, tunnel
        self.ask_port: Callable[[], int] | None = None
        self._store = store
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
                self._store = TunnelStore(store, reach) if reach else store
            return self._store

    def start_store(self) -> int:
        """Starts the store at rank 0. Returns its port."""
        store = self.store(port=0)
        inner: Any = store.inner if isinstance(store, TunnelStore) else store
        return int(inner.underlying_store.port)

    def join_group(self, role: str, timeout: float) -> None:
        """Makes torch's default process group of the members with `role`. Raises PeerLostError."""
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


def connect(context: Context[Any], directory: Path, tunnel: Path | None = None, session: Session | None = None) -> None:
    """Meets the workers of the generation that `context` has begun to be a part of: by way of the rank's `tunnel`, the
    folder with its sockets, if there is one. `directory` is the worker's own; `session` is the context's newest.

    Raises UsageError for a port that stays taken, and PeerLostError if not all members connect in time, or if the
    session ends.
    """
    session = session or context.group.session
    assert session is not None, "begin a generation first"
    if session.ended:
        raise session.error()
    settings, host, open_tunnel = context.settings, context.settings.bind_addr, None
    if host in ("", "0.0.0.0", "::"):
        host = local_address(settings.master_addr)
    if tunnel:
        open_tunnel = partial(TunnelClient, tunnel, context.me.name, host, settings.port)
    here = context.torch = Torch(context, open_tunnel)
    if context.job is not None and not context.job.rpc:
        here.store()
        return
    wire = meeting.meet(
        context,
        directory=directory,
        tunnel=open_tunnel,
        host=host,
        session=session,
    )
    rank0, seconds = context.rank0.name, settings.connect_timeout

    def ask_port() -> int:
        ask = Request("store_port", (), {}, seconds, internal=True)
        return int(wire.call(rank0, ask, Deadline(seconds, f"CONNECT_TIMEOUT={seconds:g}")).result())

    here.ask_port = ask_port
