"""A few spawned processes that are one another's RPC peers for as long as a measurement takes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import rpc

from rolecall.torch_rpc.store import interface

HOST = "127.0.0.1"
Tell = Callable[[Any], None]


def run(
    names: Sequence[str],
    function: Callable[..., Any],
    *args: Any,
    deadline: float,
    progress: Tell = lambda news: None,
    transports: Sequence[str] = ("uv",),
) -> Any:
    """Call `function(tell, *args)` in a fresh process, as the RPC worker `names[0]`; return what it returns.

    The other names are workers that serve its calls, one process each. What it passes to `tell` reaches `progress`.
    `transports` are torch's, Rolecall's by default; none: whichever torch takes by itself, as it does in its tutorials.
    Raises RuntimeError where a process fails, TimeoutError after `deadline` seconds. No process is left afterwards.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    port = _free_port()
    ends = time.monotonic() + deadline
    shared = names, port, transports, deadline, sender, function, args
    processes = [context.Process(target=_worker, args=(rank, *shared), daemon=True) for rank in range(len(names))]
    try:
        for process in processes:
            process.start()
        sender.close()
        while receiver.poll(max(0.0, ends - time.monotonic())):
            kind, value = receiver.recv()
            if kind == "result":
                return value
            if kind == "error":
                raise RuntimeError(value)
            progress(value)
        raise TimeoutError(f"{function.__name__} took longer than {deadline:g} s")
    except EOFError:
        raise RuntimeError(f"{function.__name__}: its processes ended without a result") from None
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)
        receiver.close()


def _worker(
    rank: int,
    names: Sequence[str],
    port: int,
    transports: Sequence[str],
    deadline: float,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # RPC complains there of peers that are gone, and in the end they all are; what fails is sent to the parent
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    torch.set_num_threads(1)
    try:
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface(HOST)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{HOST}:{port}",
            rpc_timeout=60,
            _transports=list(transports) or None,
            _channels=["cma", "basic"] if transports else None,
        )
        rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
        if rank == 0:
            sender.send(("result", function(lambda news: sender.send(("progress", news)), *args)))
    except Exception:  # whatever it was, the parent raises it
        sender.send(("error", f"{names[rank]}: {traceback.format_exc()}"))
    # the parent ends every process of the measurement together
    time.sleep(deadline)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # bounded by the parent's life
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
