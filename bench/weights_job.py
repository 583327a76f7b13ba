"""A job that publishes weights to its readers, for bench_weights.py: `rolecall run bench/weights_job.py`.

Rank 0 publishes; each case of a round is a publication that one or all readers wait for. It returns, by case, the
seconds until the last of them had all of it, what a reader received, and what the machine's processors took.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch

from rolecall import Context, Job, Role, Settings, remote

SECONDS = 400.0  # of one publication, at most
MATRICES, COLUMNS = 10, 1024
BLOCK, ROWS = 0.019, 20  # of an update that changes 2 %: a block, and rows here and there


class Broadcast(Settings):
    readers: int = 8
    megabytes: int = 100
    repeats: int = 1
    star: bool = False


class Pulled(NamedTuple):
    """When a reader had a version, on the monotonic clock, which all processes of the machine share, and the bytes that
    it has received so far."""

    at: float
    received: float


class Reader:
    def __init__(self, context: Context[Broadcast]) -> None:
        self.context, self.weights = context, dict[str, Any]()

    @remote
    def follow(self, name: str) -> float:
        self.weights[name] = self.context.subscribe(name)
        return self.received(name)

    @remote
    def pull(self, name: str) -> Pulled:
        weights = self.weights[name]
        weights.wait(SECONDS, new=True)
        at = time.monotonic()
        weights.load({})
        return Pulled(at, self.received(name))

    def received(self, name: str) -> float:
        samples = self.context.metrics.weights_bytes.labels(name).collect()[0].samples
        return float(samples[0].value)


class Lead:
    def __init__(self, context: Context[Broadcast]) -> None:
        self.context, self.names = context, dict[str, list[str]]()
        self.received = dict[tuple[str, str], float]()  # by name and reader, so far

    def run(self) -> dict[str, Any]:
        settings, context = self.context.settings, self.context
        context.restore({})
        everyone = [f"reader_{number}" for number in range(settings.readers)]
        self.follow("alone", everyone[:1])
        self.follow("policy", everyone)
        rows = settings.megabytes * 10**6 // (4 * COLUMNS * MATRICES)
        state = {f"layer{number}": torch.empty(rows, COLUMNS) for number in range(MATRICES)}
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(settings.repeats + 1):  # the first makes the connections
            cases = {
                "one": self.publish(["alone"], _randomized(state)),
                "all": self.publish(["policy"], _randomized(state)),
                "changed": self.publish(["policy"], _changed(state)),
                "bfloat16": self.publish(["policy"], _randomized(state), torch.bfloat16),
                "int8": self.publish(["policy"], _randomized(state), torch.int8),
            }
            for case, figures in cases.items() if number else ():
                found.setdefault(case, []).append(figures)
        if settings.star:
            names = [f"star{number}" for number in range(settings.readers)]
            for name, reader in zip(names, everyone, strict=True):
                self.follow(name, [reader])
            found["star"] = [self.publish(names, _randomized(state))]
        return {
            case: {name: statistics.median(each[name] for each in figures) for name in figures[0]}
            for case, figures in found.items()
        }

    def follow(self, name: str, readers: list[str]) -> None:
        self.names[name] = readers
        for reader in readers:
            self.received[name, reader] = self.context.call(reader, Reader.follow, name).result()

    def publish(
        self, names: Sequence[str], state: dict[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, float]:
        calls = {
            (name, reader): self.context.calls.options(timeout=SECONDS).call(reader, Reader.pull, name)
            for name in names
            for reader in self.names[name]
        }
        began, busy = time.monotonic(), _busy()
        for name in names:
            self.context.publish(name, state, dtype=dtype)
        returned = time.monotonic()
        pulled = {place: call.result() for place, call in calls.items()}
        received = [each.received - self.received[place] for place, each in pulled.items()]
        self.received |= {place: each.received for place, each in pulled.items()}
        return {
            "seconds": max(each.at for each in pulled.values()) - began,
            "copy_seconds": returned - began,
            "received_bytes": statistics.mean(received),
            "processor_seconds": _busy() - busy,
        }


def _busy() -> float:
    """Seconds that the machine's processors have worked, for whomever."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _randomized(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in state.values():
        tensor.normal_()
    return state


def _changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """2 % of the bytes: a block, and rows here and there."""
    tensors = list(state.values())
    tensors[0].view(-1)[: int(BLOCK * sum(tensor.numel() for tensor in tensors))] += 1
    for number in range(ROWS):
        tensor = tensors[1 + number % (MATRICES - 1)]
        tensor[(number * 7919) % len(tensor)] += 1
    return state


JOB = Job([Role("lead", Lead), Role("reader", Reader, count="readers")], settings=Broadcast)
