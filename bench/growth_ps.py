"""How `ps` grows with its trainers, by simulation: `python -m bench.growth_ps`.

The servers are real processes with the real code. The trainers are not: four processes pose as all of them by name, and
each trainer sends its next gradient as soon as its last one is answered. So the servers see what trainers would send
that compute in no time, and the rate at which pushes level off is what servers and network can do on this machine.

The last core is the posers', and each server has a core of its own where there are as many: servers share what is left
otherwise. So one server on two cores has one alone; two servers need three cores, and four need five. The processor
seconds of a push say what machines of their own would need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import rpc

from bench import launch, posers_ps, ranks, wires
from bench.posers_ps import POINT_SECONDS, POSERS, Posed
from rolecall import Context, Peer, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.context.transport import WireTransport
from rolecall.declare import registry
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.lead import ParameterServer

TRAINERS = (1, 2, 4, 8, 16, 32, 64)
SERVERS = (1, 2, 4)
MODES = ("sync", "async")
SATURATED = 0.9  # of the highest rate
START_SECONDS = 120.0  # deadline


@dataclass(frozen=True)
class Point:
    """`pushes_per_s` is of all trainers together: gradients applied and parameters sent back. `server_cores` is how
    many all servers share, 0 where nothing is bound to cores; the processor seconds are of one push, at all servers
    together and at the trainers.
    """

    update_mode: str
    servers: int
    trainers: int
    pushes_per_s: float
    server_cores: int
    servers_cpu_s: float
    trainers_cpu_s: float


def measure(
    update_mode: str,
    servers: int,
    trainers: Sequence[int] = TRAINERS,
    seconds: float = 2.0,
    progress: Callable[[str], None] = lambda news: None,
) -> list[Point]:
    """A point for each number of trainers, of some `seconds` seconds each.

    Raises RuntimeError where a process fails, TimeoutError where they take much too long. No process is left.
    """
    names = [*(f"ps_{number}" for number in range(servers)), *(f"poser_{number}" for number in range(POSERS))]
    deadline = START_SECONDS + POINT_SECONDS * len(trainers)
    with tempfile.TemporaryDirectory(prefix="bench-ps-growth-") as directory:
        points: list[Point] = ranks.run(names, _lead, update_mode, servers, tuple(trainers), seconds, directory,
                                        deadline=deadline, progress=progress)  # fmt: skip
    return points


def layout(servers: int, cores: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """The cores of each server, and those of the posers: all of them for everybody where there is only one."""
    if len(cores) < 2:
        return [list(cores)] * servers, list(cores)
    mine = cores[: min(servers, len(cores) - 1)]
    return [[mine[number % len(mine)]] for number in range(servers)], list(cores[len(mine) :])


def curves(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """The points by UPDATE_MODE and SERVERS."""
    by_servers: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        by_servers.setdefault((point.update_mode, point.servers), []).append(point)
    return by_servers


def saturation(points: Sequence[Point]) -> tuple[int, float]:
    """The fewest trainers with which pushes are nearly as fast as they get, and how fast they get."""
    most = max(point.pushes_per_s for point in points)
    return min(point.trainers for point in points if point.pushes_per_s >= SATURATED * most), most


def table(points: Sequence[Point]) -> Table:
    """The results for people."""
    counts = sorted({point.trainers for point in points})
    shown = Table("pushes a second, trainers:", *map(str, counts), "saturated at", "cores", "ms of servers a push",
                  title="Growth (simulated: trainers that compute in no time)")  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for (mode, servers), curve in curves(points).items():
        rates = {point.trainers: f"{point.pushes_per_s:,.0f}" for point in curve}
        most = max(curve, key=lambda point: point.pushes_per_s)
        shown.add_row(f"{mode}, SERVERS={servers}", *(rates.get(count, "") for count in counts),
                      f"{saturation(curve)[0]}", str(most.server_cores or "all"),
                      f"{1000 * most.servers_cpu_s:.2f}")  # fmt: skip
    return shown


# ---- the servers


def _lead(
    tell: ranks.Tell, update_mode: str, servers: int, trainers: tuple[int, ...], seconds: float, directory: str
) -> list[Point]:
    """A point with each number of trainers."""
    points = []
    names, posers = [f"ps_{number}" for number in range(servers)], [f"poser_{number}" for number in range(POSERS)]
    wires.connect([*names, *posers], directory)
    cores, others = layout(servers, sorted(os.sched_getaffinity(0)))
    for name, bound in (*zip(names, cores, strict=True), *((name, others) for name in posers)):
        rpc.rpc_sync(name, bind, args=(bound,))
    shared = len({core for bound in cores for core in bound}) if cores[0] != others else 0
    for count in trainers:
        tell(f"{count} trainers")
        started = [rpc.rpc_async(name, _serve, args=(update_mode, servers, count, directory)) for name in names[1:]]
        torch.futures.wait_all(started)
        context, thread = _serve(update_mode, servers, count, directory)
        groups = {name: group for number, name in enumerate(posers) if (group := _names(count)[number::POSERS])}
        _all(groups, posers_ps.prepare, lambda group: (update_mode, servers, group))
        used = _used(names)
        posed: list[Posed] = _all(groups, posers_ps.pose, lambda group: (seconds,))
        used, answers = _used(names) - used, sum(each.answers for each in posed)
        points.append(
            Point(update_mode, servers, count, sum(each.rate for each in posed), shared, used / answers,
                  sum(each.cpu_s for each in posed) / answers)
        )  # fmt: skip
        context.drain()
        thread.join(POINT_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"the lead did not drain with {count} trainers")
    return points


def bind(cores: list[int]) -> None:
    """Binds all threads of this process, and those that they will start, to `cores`."""
    again = True
    while again:  # a thread that is not bound yet may have started another
        again = False
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                if os.sched_getaffinity(int(thread.name)) != set(cores):
                    os.sched_setaffinity(int(thread.name), cores)
                    again = True


def _used(names: Sequence[str]) -> float:
    """Processor seconds so far of the processes `names` together."""
    return float(sum(rpc.rpc_sync(name, time.process_time) for name in names))


def _all(
    groups: dict[str, tuple[str, ...]],
    function: Callable[..., Any],
    arguments: Callable[[tuple[str, ...]], tuple[Any, ...]],
) -> list[Any]:
    """Calls `function` at all posers at the same time."""
    started = [rpc.rpc_async(name, function, args=arguments(group), timeout=2 * POINT_SECONDS)
               for name, group in groups.items()]  # fmt: skip
    return list(torch.futures.wait_all(started))


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"trainer_{ordinal}" for ordinal in _ordinals(count))


def _ordinals(count: int) -> range:
    """Other ones at each point: what is still under way when a point ends is no trainer's of the next one."""
    return range(1000 * count, 1001 * count)


def _serve(update_mode: str, servers: int, trainers: int, directory: str) -> Any:
    """Begins a server for `trainers` trainers, in a thread. Called at each server, once for each point."""
    settings = posers_ps.settings(update_mode, servers)
    rank = rpc.get_worker_info().id
    members = (
        *(Peer("ps", number, number) for number in range(servers)),
        *(Peer("trainer", ordinal, servers + place) for place, ordinal in enumerate(_ordinals(trainers))),
    )
    metrics = telemetry.build([*telemetry.WORKER, *registry.get("ps").metrics])
    telemetry.setup_logging("text", "error")
    path = Path(directory, f"{trainers}")
    path.mkdir(exist_ok=True)
    job = registry.get("ps")
    context = Context(
        settings, Attachment(1, members[rank], members), metrics, job, checkpoints=Checkpoints(path, "ps", 1)
    )
    wired = wires.here()
    context.transport = _Transport(
        wired.wire, metrics, context.watchdog, rank0=members[0].name, rpc_timeout=settings.rpc_timeout
    )
    context.shares = wired.shares  # a process is several servers, one after the other
    server = ParameterServer(context)
    wired.wire.dispatcher.serve(server)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    return (context, thread) if rank == 0 else None


class _Transport(WireTransport):
    """Calls over the wire that is connected already."""

    def on_disconnect(self, to: str, gone: Callable[[str], None]) -> None:
        """The trainers are no processes of their own."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns 0, 1 where a process fails, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth_ps", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each point")
    parser.add_argument("--servers", type=int, nargs="+", default=list(SERVERS), help="numbers of servers")
    parser.add_argument("--trainers", type=int, nargs="+", default=list(TRAINERS), help="numbers of trainers")
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or min(*arguments.trainers, *arguments.servers) < 1:
        parser.error("--seconds, --servers and --trainers must be positive")
    launch.clean_environment(PsSettings)
    console, points = Console(), list[Point]()
    try:
        for mode in MODES:
            for servers in arguments.servers:
                points += measure(mode, servers, arguments.trainers, arguments.seconds)
                console.print(table(points[-len(arguments.trainers) :]))
    except (RuntimeError, TimeoutError) as error:
        console.print(f"growth_ps: {error}", markup=False, highlight=False)
        return 1
    console.print(table(points))
    if target := os.environ.get("BENCH_JSON"):
        Path(target).write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
