"""What it costs to connect the workers of one generation: `python -m bench.bench_connect`.

Workers that do nothing meet as torch's `init_rpc` has them meet, as Rolecall does for torch's RPC (torch_rpc/agent.py),
and as it does for its own calls (context/meeting.py), unencrypted. Then rank 0 calls each of them, as in a star. It
prints seconds, the CPU seconds of all workers, the TCP connections that were opened, the sockets that stay, and the
memory of a worker. With BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from rolecall import Context, remote, telemetry
from rolecall.config import Settings
from rolecall.context.meeting import meet
from rolecall.declare.task import Peer
from rolecall.torch_rpc import agent
from rolecall.torch_rpc.store import open_store

SIZES = (4, 16, 64, 128)
WAYS = ("torch", "torch_rpc", "rolecall")
DEADLINE = 120.0  # seconds for a part
HOST = "127.0.0.1"


@dataclass(eq=False)
class Connected:
    """One generation.

    Seconds of the slowest worker, CPU seconds of all, connections that this machine opened meanwhile, TCP sockets that
    stay, and the bytes (PSS) of the median worker.
    """

    way: str
    workers: int
    connect_s: float = 0.0
    connect_cpu_s: float = 0.0
    opened: int = 0
    sockets: float = 0.0
    rank_0_sockets: int = 0
    star_s: float = 0.0
    star_sockets: float = 0.0
    bytes: float = 0.0
    threads: float = 0.0
    part: str = ""


class Member:
    """What each worker of the way `rolecall` serves."""

    @remote
    def process(self) -> int:
        return os.getpid()


def worker(rank: int, size: int, port: int, way: str, pipe: Connection) -> None:
    """Connects when it is told to, and serves until it is ended."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    members = tuple(Peer("w", number, number) for number in range(size))
    try:
        pipe.send("ready")
        pipe.recv()
        started = time.perf_counter()
        call_all = _meet(members, rank, port) if way == "rolecall" else _init_rpc(members, rank, port, way)
        pipe.send(time.perf_counter() - started)
        pipe.recv()
        if rank == 0:
            started = time.perf_counter()
            call_all()
            pipe.send(time.perf_counter() - started)
    except Exception as error:  # the parent says which part failed
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
    time.sleep(4 * DEADLINE)  # the parent ends it


def _meet(members: tuple[Peer, ...], rank: int, port: int) -> Callable[[], object]:
    """Connects by the wire. Returns what calls all others."""
    # "always", but with no tunnel: by TCP, as between machines, and not by Unix sockets
    settings = Settings(
        connect_timeout=DEADLINE, rpc_timeout=DEADLINE, master_addr=HOST, port=port - 1, bind_addr=HOST, tls="always"
    )
    context = Context(settings, members[rank], members, 1, telemetry.build(telemetry.WORKER))
    wire, _ = meet(context, directory=Path(), tunnel=None, host=HOST, open_store=lambda: 0, with_store=False)
    wire.dispatcher.serve(Member())
    return lambda: context.wait_all([context.call(peer, Member.process) for peer in members[1:]])


def _init_rpc(members: tuple[Peer, ...], rank: int, port: int, way: str) -> Callable[[], object]:
    """Connects by torch's RPC. Returns what calls all others."""
    settings = Settings(connect_timeout=DEADLINE, master_addr=HOST, master_port=port, bind_addr=HOST)
    store = open_store(settings, 1, rank, len(members))
    if way == "torch_rpc":
        context: Any = SimpleNamespace(
            me=members[rank], members=members, mapped=set[str](), device=torch.device("cpu"), settings=settings
        )
        agent.start(context, store)
    else:
        register_rendezvous_handler("bench", lambda url, **_: iter([(store, rank, len(members))]))
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=16,
            rpc_timeout=DEADLINE,
            init_method="bench://",
            _transports=["uv"],
            _channels=["basic"],
        )
        rpc.init_rpc(members[rank].name, rank=rank, world_size=len(members), rpc_backend_options=options)
    return lambda: torch.futures.wait_all([rpc.rpc_async(peer.name, os.getpid) for peer in members[1:]])


def measure(way: str, size: int, keep: Callable[[Connected], None]) -> None:
    """One generation of `size` workers. Raises RuntimeError or TimeoutError, which names the part."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rolecall.torch_rpc.agent"])
    connected = Connected(way, size)
    keep(connected)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(rank, size, port, way, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        seen = [psutil.Process(process.pid or 0) for process in processes]
        _answers(connected, "start", pipes)
        opened, cpu = _opened(), sum(map(_cpu, seen))
        connected.connect_s = max(_answers(connected, "connect", pipes, told=pipes))
        connected.opened, connected.connect_cpu_s = _opened() - opened, sum(map(_cpu, seen)) - cpu
        sockets = [_sockets(process) for process in seen]
        connected.sockets, connected.rank_0_sockets = statistics.median(sockets[1:]), sockets[0]
        keep(connected)
        (connected.star_s,) = _answers(connected, "calls of rank 0", pipes[:1], told=pipes)
        connected.star_sockets = statistics.median(map(_sockets, seen[1:]))
        connected.bytes = statistics.median(process.memory_full_info().pss for process in seen[1:])
        connected.threads = statistics.median(process.num_threads() for process in seen[1:])
        connected.part = "done"
        keep(connected)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)


def _answers(
    connected: Connected, part: str, pipes: list[Connection], told: list[Connection] | None = None
) -> list[Any]:
    connected.part = part
    for pipe in told or ():
        pipe.send("go")
    left, answers, ends = set(pipes), [], time.monotonic() + DEADLINE
    while left:
        ready = wait(list(left), ends - time.monotonic())
        if not ready:
            raise TimeoutError(f"{connected.workers} workers, {connected.way}, {part}: not within {DEADLINE:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            answer = pipe.recv()
            if isinstance(answer, Exception):
                raise RuntimeError(f"{connected.workers} workers, {connected.way}, {part}: {answer}")
            answers.append(answer)
            left.discard(pipe)
    return answers


def _opened() -> int:
    """TCP connections that the processes of this machine have opened so far."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("ActiveOpens")])


def _cpu(process: psutil.Process) -> float:
    """CPU seconds that it has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _sockets(process: psutil.Process) -> int:
    """Its connected TCP sockets."""
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_connect", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="of a generation")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args(argv)
    console, results, failed = Console(width=120), [], False
    target = os.environ.get("BENCH_JSON")

    def keep(connected: Connected) -> None:
        if connected not in results:
            results.append(connected)
        if target:
            Path(target).write_text(json.dumps({"generations": [asdict(one) for one in results]}, indent=1) + "\n")

    for size in arguments.workers:
        for way in arguments.ways:
            console.print(f"{size} workers, {way}", highlight=False)
            try:
                measure(way, size, keep)
            except (RuntimeError, TimeoutError) as error:
                console.print(f"bench-connect: {error}", markup=False, highlight=False)
                failed = True
    table = Table("workers", "way", "connect s", "CPU s", "opened", "sockets a worker", "at rank 0", "calls all s",
                  "sockets then", "MB a worker", "threads")  # fmt: skip
    for one in results:
        row = (f"{one.workers}", one.way, f"{one.connect_s:.2f}", f"{one.connect_cpu_s:.2f}",
               f"{one.opened}", f"{one.sockets:.0f}",
               f"{one.rank_0_sockets}", f"{one.star_s:.2f}", f"{one.star_sockets:.0f}", f"{one.bytes / 1e6:.0f}",
               f"{one.threads:.0f}")  # fmt: skip
        table.add_row(*row)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
