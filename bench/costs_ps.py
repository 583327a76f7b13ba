"""Measures what `scale_model` is fed with, and writes costs_ps.json: `python -m bench.costs_ps`.

Costs are processor seconds, not seconds of a clock: a busy machine changes them little. Messages go between two
processes, with what `ps` sends, by each kind of connection.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import rpc

from bench import launch, ranks, wires
from bench.scale_model import COSTS, Costs, MessageCosts
from rolecall import config, remote
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.events import Events, Inbox
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import BatchReport, GradientKey, PartAnswer, TrainerId, UpdateShard
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.shard import Shard
from rolecall.wire.connecting import Kind

IN_FLIGHT = 8
SMALL = 4000  # calls
BULK, BULK_ELEMENTS = 100, 1_250_000  # calls with a tensor of 5 MB
SIZED, SIZED_ELEMENTS = 2000, 256  # calls with a tensor of 1 kB
ORDERED, KEYS = 300, 500  # calls with an order that names as many gradients
ELEMENTS = 2**20  # of the shard that is updated
DEADLINE = 300.0


def measure() -> Costs:
    """All costs. Raises RuntimeError or TimeoutError where a process fails."""
    messages = {kind: _between_processes(_messages, kind) for kind in get_args(Kind)}
    order_key_s, complete_key_s = _between_processes(_keys, "unix")
    few, many = _ledger_seconds(50), _ledger_seconds(1000)
    per_trainer = max(0.0, (many - few) / 950)
    apply_s, step_s = update_seconds()
    return Costs(
        messages, apply_s=apply_s, step_s=step_s, ledger_s=max(0.0, few - 50 * per_trainer),
        ledger_trainer_s=per_trainer, order_key_s=order_key_s, complete_key_s=complete_key_s,
        arrived_key_s=_arrived_seconds(),
    )  # fmt: skip


# ---- messages


def _between_processes(measure: Callable[..., Any], kind: Kind) -> Any:
    with tempfile.TemporaryDirectory(prefix="bench-ps-costs-") as directory:
        return ranks.run(["caller", "server"], measure, kind, directory, deadline=DEADLINE)


def _messages(tell: ranks.Tell, kind: Kind, directory: str) -> MessageCosts:
    """In the process `caller`: the processor seconds at either end."""
    _connect(kind, directory)
    key, bulk, sized = GradientKey(_trainer("1000"), 1000), torch.zeros(BULK_ELEMENTS), torch.zeros(SIZED_ELEMENTS)
    call_s, serve_s = _both(SMALL, Taker.take, key)
    tensor = [each - small for each, small in zip(_both(SIZED, Taker.take, sized), (call_s, serve_s), strict=True)]
    sent, received = _both(BULK, Taker.take, bulk)
    asked, answered = _both(BULK, Taker.give, BULK_ELEMENTS)
    size = 4 * BULK_ELEMENTS
    return MessageCosts(
        call_s, serve_s, tensor_s=max(0.0, sum(tensor) / 2),
        send_byte_s=max(0.0, (sent - call_s + answered - serve_s) / 2 / size),
        receive_byte_s=max(0.0, (received - serve_s + asked - call_s) / 2 / size),
    )  # fmt: skip


def _keys(tell: ranks.Tell, kind: Kind, directory: str) -> tuple[float, float]:
    """In the process `caller`: processor seconds of a gradient in an order at its caller, and in a report at the called
    process."""
    _connect(kind, directory)
    call_s, serve_s = _both(SMALL, Taker.take, GradientKey(_trainer("1000"), 1000))
    keys = [GradientKey(_trainer(str(number)), 1000) for number in range(KEYS)]
    order = UpdateShard(1, dict.fromkeys(keys, 1 / KEYS), 1.0, tuple(keys))
    ordered, _ = _both(ORDERED, Taker.take, order)
    _, reported = _both(ORDERED, Taker.take, keys)
    return max(0.0, (ordered - call_s) / KEYS), max(0.0, (reported - serve_s) / KEYS)


def _connect(kind: Kind, directory: str) -> None:
    wires.connect(["caller", "server"], directory, kind)
    rpc.rpc_sync("server", _serve)


def _both(count: int, method: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """Processor seconds of a call, at the caller and at the called process."""
    _make(count // 10, method, *args)
    there, here = rpc.rpc_sync("server", time.process_time), time.process_time()
    _make(count, method, *args)
    here = time.process_time() - here
    return here / count, (rpc.rpc_sync("server", time.process_time) - there) / count


def _make(count: int, method: Callable[..., Any], *args: Any) -> None:
    waiting = deque[Future[Any]]()
    for _ in range(count):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().result()
        waiting.append(wires.here().call("server", method, *args))
    for call in waiting:
        call.result()


def _serve() -> None:
    wires.here().wire.dispatcher.serve(Taker())


class Taker:
    """What the process `server` serves."""

    @remote
    def take(self, what: Any) -> None:
        """As the lead takes `complete`, and a server a gradient."""

    @remote
    def give(self, elements: int) -> Tensor:
        return torch.zeros(1).expand(elements).contiguous()


# ---- the lead and a server, without messages


def _trainer(number: str) -> TrainerId:
    return TrainerId(f"trainer_{number}", 1, 0)


def _ledger_seconds(trainers: int) -> float:
    """Processor seconds of the lead's ledger for a gradient of `sync`."""
    names = [_trainer(str(number)) for number in range(trainers)]
    rounds = max(3, 3000 // trainers)
    ledger = Ledger(32 * trainers * (rounds + 1), 32, 1, 0, names, sync=True)
    for name in names:
        ledger.take(GradientKey(name, 0), 0, 0)
    started = time.process_time()
    for number in range(1, rounds + 1):
        for name in names:
            ledger.take(GradientKey(name, number), ledger.version, 32)
    return (time.process_time() - started) / (rounds * trainers)


def _arrived_seconds() -> float:
    """Processor seconds of the lead to count a server that has a gradient, once the report is unpickled."""
    names, inbox, servers = [_trainer(str(number)) for number in range(KEYS)], Inbox(), 100
    events, keys = Events(inbox, servers, names, lambda: names), [GradientKey(name, 1) for name in names]
    started, whole = time.process_time(), 0
    for _ in range(servers):
        for key in keys:
            inbox.put(key)
    while whole < KEYS:
        whole += events.next() is not None
    return (time.process_time() - started) / (servers * KEYS)


def update_seconds() -> tuple[float, float]:
    """Processor seconds of an element: to join the mean, and of the optimizer's step."""
    torch.set_num_threads(1)
    shard = Shard([(0, Part(0, ELEMENTS, 0))], config.load(PsSettings), ELEMENTS)
    gradient = torch.full((ELEMENTS,), 1e-6)

    def seconds(gradients: int, rounds: int = 12) -> float:
        used = 0.0
        for number in range(rounds):
            keys = [GradientKey(_trainer(str(each)), number) for each in range(gradients)]
            for key in keys:
                shard.receive(key, 0, gradient, Future[PartAnswer](), BatchReport(0, 32))
            started = time.process_time()
            shard.apply(0, dict.fromkeys(keys, 1 / gradients), 1.0)
            used += (time.process_time() - started) * (number > 1)
            shard.answer(0, keys, {}, {})
        return used / (rounds - 2) / ELEMENTS

    few, many = seconds(2), seconds(18)
    each = max(0.0, (many - few) / 16)
    return each, max(0.0, few - 2 * each)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The same, each number to three digits."""
    return {
        name: _rounded(value) if isinstance(value, dict) else float(f"{value:.3g}") for name, value in values.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write. Returns 0, 1 where a process fails, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs_ps", description=__doc__)
    parser.add_argument("--output", type=Path, default=COSTS, help="the file to write")
    arguments = parser.parse_args(argv)
    launch.clean_environment(PsSettings)
    try:
        costs = measure()
    except (RuntimeError, TimeoutError) as error:
        print(f"costs_ps: {error}")
        return 1
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version(),
               "torch": torch.__version__}  # fmt: skip
    text = json.dumps({"costs": _rounded(costs.to_json()), "measured_on": machine}, indent=1)
    arguments.output.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
