"""Calls by torch's RPC, plain: on one machine as torch sets it up by itself, between machines over its sockets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc

from bench.peers import calls

LOOPBACK = "127.0.0.1"
INTERFACE = "eth0"  # of a namespace


def echo(payload: Any) -> Any:
    return payload


def main() -> None:
    chosen = calls.options(__doc__)
    torch.set_num_threads(1)
    apart = {}
    if chosen.address != LOOPBACK:  # namespaces of one machine share its memory, which machines do not
        apart = {"_transports": ["uv"], "_channels": ["basic"]}
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{chosen.address}:{chosen.port}", rpc_timeout=60, **apart
    )
    name = "callee" if chosen.listen else "caller"
    if chosen.listen:
        calls.ready()  # it meets the other
    rpc.init_rpc(name, rank=int(not chosen.listen), world_size=2, rpc_backend_options=options)
    if chosen.listen:
        threading.Event().wait()  # the benchmark ends it

    def send(payload: Any) -> Callable[[], Any]:
        return rpc.rpc_async("callee", echo, args=(payload,)).wait

    calls.measure(chosen, send, torch.from_numpy, rpc.rpc_sync("callee", os.getpid))


if __name__ == "__main__":
    main()
