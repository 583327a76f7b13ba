"""How `ps` grows with its trainers, by simulation: `python -m tests.benchmarks.growth_ps`.

The servers are real processes with the real code. The trainers are not: two processes pose as all of them by name, and
each trainer sends its next gradient as soon as its last one is answered. So the servers see what trainers would send
that compute in no time, and the rate at which pushes level off is what servers and network can do on this machine, on
which all of these processes share the cores.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import rpc

from rolecall import Context, Peer, RankObject, config, telemetry
from rolecall.job import registry
from rolecall.job.checkpoint import Checkpoints
from rolecall.job.rpc import TorchRpc
from rolecall.jobs.ps import PsSettings, calls, lead, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey
from tests.benchmarks import launch, ranks

TRAINERS = (1, 2, 4, 8, 16, 32, 64)
SERVERS = (1, 4)
MODES = ("sync", "async")
POSERS = 2  # processes
SAMPLES = 60_000  # of the data that is handed out: as many as MNIST has
LEAST = 3  # pushes of each trainer that count, at least
SATURATED = 0.9  # of the highest rate
START_SECONDS, POINT_SECONDS = 120.0, 60.0  # deadlines
NEVER = 1_000_000


@dataclass(frozen=True)
class Point:
    """`pushes_per_s` is of all trainers together: gradients applied and parameters sent back."""

    update_mode: str
    servers: int
    trainers: int
    pushes_per_s: float


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
        rates = ranks.run(names, _lead, update_mode, servers, tuple(trainers), seconds, directory, deadline=deadline,
                          progress=progress)  # fmt: skip
    return [Point(update_mode, servers, count, rate) for count, rate in zip(trainers, rates, strict=True)]


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
    shown = Table("pushes a second, trainers:", *map(str, counts), "saturated at",
                  title="Growth (simulated: trainers that compute in no time)")  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for (mode, servers), curve in curves(points).items():
        rates = {point.trainers: f"{point.pushes_per_s:,.0f}" for point in curve}
        shown.add_row(f"{mode}, SERVERS={servers}", *(rates.get(count, "") for count in counts),
                      f"{saturation(curve)[0]}")  # fmt: skip
    return shown


class Blank:
    """As many samples as MNIST has, of which only the number matters."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 28, 28), 0


def blank() -> tuple[Blank, Blank]:
    """The training and the test data: a DATASET."""
    return Blank(), Blank()


# ---- the servers


def _lead(
    tell: ranks.Tell, update_mode: str, servers: int, trainers: tuple[int, ...], seconds: float, directory: str
) -> list[float]:
    """The rate with each number of trainers."""
    rates = []
    for count in trainers:
        tell(f"{count} trainers")
        others = [f"ps_{number}" for number in range(1, servers)]
        started = [rpc.rpc_async(name, _serve, args=(update_mode, servers, count, directory)) for name in others]
        torch.futures.wait_all(started)
        context, thread = _serve(update_mode, servers, count, directory)
        rates.append(_push(_settings(update_mode, servers), count, seconds))
        context.drain()
        thread.join(POINT_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"the lead did not drain with {count} trainers")
    return rates


def _push(settings: PsSettings, count: int, seconds: float) -> float:
    pushes = [
        rpc.rpc_async(f"poser_{number}", _pose, args=(settings.update_mode, settings.servers, names, seconds))
        for number in range(POSERS)
        if (names := tuple(f"trainer_{ordinal}" for ordinal in _ordinals(count)[number::POSERS]))
    ]
    return float(sum(torch.futures.wait_all(pushes)))


def _ordinals(count: int) -> range:
    """Other ones at each point: what is still under way when a point ends is no trainer's of the next one."""
    return range(1000 * count, 1001 * count)


def _settings(update_mode: str, servers: int) -> PsSettings:
    return config.load(PsSettings, update_mode=update_mode, servers=servers, dataset="tests.benchmarks.growth_ps:blank",
                       epochs=NEVER, log_interval=NEVER, checkpoint_interval=86400)  # fmt: skip


def _serve(update_mode: str, servers: int, trainers: int, directory: str) -> Any:
    """Begins a server for `trainers` trainers, in a thread. Called at each server, once for each point."""
    settings = _settings(update_mode, servers)
    rank = rpc.get_worker_info().id
    members = (
        *(Peer("ps", number, number) for number in range(servers)),
        *(Peer("trainer", ordinal, servers + place) for place, ordinal in enumerate(_ordinals(trainers))),
    )
    metrics = telemetry.build([*telemetry.WORKER, *registry.get("ps").metrics])
    telemetry.setup_logging("text", "error")
    calls.INBOX, calls.SERVER = RankObject(), RankObject()  # a worker is one server; here a process is several in turn
    path = Path(directory, f"{trainers}")
    path.mkdir(exist_ok=True)
    job = registry.get("ps")
    context = Context(settings, members[rank], members, 1, metrics, job, checkpoints=Checkpoints(path, "ps", 1))
    context.transport = _Transport(metrics, None)  # type: ignore[arg-type]
    thread = threading.Thread(target=lead.run, args=(context,), daemon=True)
    thread.start()
    return (context, thread) if rank == 0 else None


class _Transport(TorchRpc):
    """Calls over the RPC that is connected already."""

    def on_disconnect(self, to: str, gone: Callable[[str], None]) -> None:
        """The trainers are no processes of their own."""


# ---- the trainers


@dataclass
class _Posed:
    """A trainer that computes nothing: what it has in hand, and when its pushes were answered."""

    name: str
    number: int = 0  # of its next gradient
    version: int = 0
    batches: deque[int] = field(default_factory=deque)
    calls: list[torch.futures.Future[Any]] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)

    def rate(self, warm: float) -> float:
        """Answers a second between the first and the last that count."""
        times = [at for at in self.answered if at > warm]
        times = times if len(times) > LEAST else self.answered[-LEAST - 1 :]
        return (len(times) - 1) / (times[-1] - times[0])


class _Poser:
    """Exchanges for several trainers, each with one gradient under way."""

    def __init__(self, settings: PsSettings, names: Sequence[str]) -> None:
        self._parts = model.parts(model.build(settings), settings)
        # all send the same memory: nobody changes it
        self._gradients = [torch.full((part.stop - part.start,), 1e-6) for part in self._parts]
        self._ready: queue.SimpleQueue[_Posed] = queue.SimpleQueue()
        self.posed = [_Posed(name) for name in names]

    def run(self, seconds: float) -> float:
        """Answers a second, of all trainers; the first third of the time warms up."""
        started = time.perf_counter()
        for posed in self.posed:
            self._send(posed, BatchReport(0, 0), [None] * len(self._parts))
        while not self._enough(started + seconds):
            left = started + seconds - time.perf_counter()
            try:
                posed = self._ready.get(timeout=left if left > 0 else 0.1)
            except queue.Empty:  # sync: the others have stopped already
                if time.perf_counter() > started + POINT_SECONDS / 2:
                    raise TimeoutError(f"too few answers within {POINT_SECONDS / 2:g} s") from None
                continue
            self._take(posed)
            self._send(posed, BatchReport(posed.version, posed.batches.popleft(), loss=2.3), self._gradients)
        return sum(posed.rate(started + seconds / 3) for posed in self.posed)

    def _enough(self, ends: float) -> bool:
        # of the answers, the first one is to no gradient
        return time.perf_counter() > ends and all(len(posed.answered) > LEAST + 1 for posed in self.posed)

    def _send(self, posed: _Posed, report: BatchReport, gradients: Sequence[Tensor | None]) -> None:
        posed.calls = [
            rpc.rpc_async(
                f"ps_{part.server}", calls.exchange, timeout=2 * POINT_SECONDS,
                args=(GradientKey(posed.name, posed.number), index, gradient, report if index == 0 else None),
            )
            for index, (part, gradient) in enumerate(zip(self._parts, gradients, strict=True))
        ]  # fmt: skip
        posed.number += 1
        torch.futures.collect_all(posed.calls).add_done_callback(lambda _: self._ready.put(posed))

    def _take(self, posed: _Posed) -> None:
        for call in posed.calls:
            assignment = call.wait().assignment  # it has come; raises what it raised
            if assignment is not None:
                posed.version = assignment.version
                posed.batches.extend(len(batch) for batch in assignment.batches)
        posed.answered.append(time.perf_counter())


def _pose(update_mode: str, servers: int, names: tuple[str, ...], seconds: float) -> float:
    return _Poser(_settings(update_mode, servers), names).run(seconds)


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns 0, 1 where a process fails, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.growth_ps", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each point")
    parser.add_argument("--trainers", type=int, nargs="+", default=list(TRAINERS), help="numbers of trainers")
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or min(arguments.trainers) < 1:
        parser.error("--seconds and --trainers must be positive")
    launch.clean_environment(PsSettings)
    console, points = Console(), list[Point]()
    try:
        for mode in MODES:
            for servers in SERVERS:
                points += measure(mode, servers, arguments.trainers, arguments.seconds)
                console.print(table(points[-len(arguments.trainers) :]))
    except (RuntimeError, TimeoutError) as error:
        console.print(f"growth_ps: {error}", markup=False, highlight=False)
        return 1
    console.print(table(points))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
