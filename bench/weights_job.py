"""A job that publishes weights to its readers, for bench_weights.py: `rolecall run bench/weights_job.py`.

Rank 0 publishes; each case of a round is a publication that one or all readers wait for. It returns, by case, the
seconds until the last of them had all of it, what a reader received, and what the machine's processors took.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rolecall import Context, Job, Role, Settings, remote

SECONDS = 400.0  # of one publication, at most
MATRICES, COLUMNS = 10, 1024
BLOCK, MEGABYTES_A_ROW = 0.019, 5  # of an update that changes 2 %: a block, and rows here and there


class Broadcast(Settings):
    readers: int = 8
    megabytes: int = 100
    repeats: int = 1
    star: bool = False


class Pulled(NamedTuple):
    """When a reader had a version, on the monotonic clock, which all processes of the machine share; the bytes that it
    has received, and the seconds that its worker has computed, so far."""

    at: float
    received: float
    computed: float


class Reader:
    def __init__(self, context: Context[Broadcast]) -> None:
        self.context, self.weights = context, dict[str, Any]()

    @remote
    def follow(self, name: str) -> None:
        self.weights[name] = self.context.subscribe(name)

    @remote
    def so_far(self, name: str) -> Pulled:
        return Pulled(time.monotonic(), self.received(name), time.process_time())

    @remote
    def pull(self, name: str) -> Pulled:
        weights = self.weights[name]
        weights.wait(SECONDS, new=True)
        at = time.monotonic()
        weights.load({})
        return self.so_far(name)._replace(at=at)

    def received(self, name: str) -> float:
        samples = self.context.metrics.weights_bytes.labels(name).collect()[0].samples
        return float(samples[0].value)


class Lead:
    def __init__(self, context: Context[Broadcast]) -> None:
        self.context, self.names = context, dict[str, list[str]]()

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
            self.context.call(reader, Reader.follow, name).result()

    def publish(
        self, names: Sequence[str], state: dict[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, float]:
        call = self.context.options(timeout=SECONDS).call
        places = [(name, reader) for name in names for reader in self.names[name]]
        before = [call(reader, Reader.so_far, name).result() for name, reader in places]
        calls = [call(reader, Reader.pull, name) for name, reader in places]
        began, computed = time.monotonic(), time.process_time()
        for name in names:
            self.context.publish(name, state, dtype=dtype)
        returned = time.monotonic()
        pulled = [call.result() for call in calls]
        pairs = list(zip(before, pulled, strict=True))
        workers = sum(after.computed - earlier.computed for earlier, after in pairs) + time.process_time() - computed
        return {
            "seconds": max(each.at for each in pulled) - began,
            "copy_seconds": returned - began,
            "received_bytes": statistics.mean(after.received - earlier.received for earlier, after in pairs),
            "processor_seconds": workers,
        }


def _randomized(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in state.values():
        tensor.normal_()
    return state


def _changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """2 % of the bytes: a block, and rows here and there."""
    tensors = list(state.values())
    tensors[0].view(-1)[: int(BLOCK * sum(tensor.numel() for tensor in tensors))] += 1
    for number in range(sum(tensor.nbytes for tensor in tensors) // (MEGABYTES_A_ROW * 10**6)):
        tensor = tensors[1 + number % (MATRICES - 1)]
        tensor[(number * 7919) % len(tensor)] += 1
    return state


JOB = Job([Role("lead", Lead), Role("reader", Reader, count="readers")], settings=Broadcast)
