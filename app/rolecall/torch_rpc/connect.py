"""Connects a worker to its generation: by the wire and, if the job says so, by torch's RPC.

A process connects once for each of its parts in a generation. Torch's RPC starts once a process: workers that use it
are fresh processes, and end without a shutdown.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rolecall.context import meeting
from rolecall.context.context import Context
from rolecall.declare import registry
from rolecall.torch_rpc.distributed import Torch
from rolecall.torch_rpc.store import local_address
from rolecall.tunnel.client import TunnelClient
from rolecall.wire.messages import Deadline, Request
from rolecall.wire.session import Session


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
    torch = context.torch = Torch(context, open_tunnel)
    if context.job is not None and not context.job.rpc:
        torch.store()
        return
    with_rpc = context.job is not None and registry.uses_torch_rpc(context.job, settings)
    wire, store_port = meeting.meet(
        context,
        directory=directory,
        tunnel=open_tunnel,
        host=host,
        session=session,
        with_store=with_rpc,
    )
    rank0, seconds = context.rank0.name, settings.connect_timeout

    def ask_port() -> int:
        ask = Request("store_port", (), {}, seconds, internal=True)
        return int(wire.call(rank0, ask, Deadline(seconds, f"CONNECT_TIMEOUT={seconds:g}")).result())

    torch.ask_port = ask_port
    if with_rpc:
        torch.start_rpc(store_port)
