"""Processes that pose as trainers of `ps` which compute in no time, for `growth_ps`."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bench import wires
from rolecall import config
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart, PartAnswer, TrainerId
from rolecall.jobs.ps.server import Server

SAMPLES = 60_000  # of the data that is handed out: as many as MNIST has
LEAST = 3  # pushes of each trainer that count, at least
POSERS = 4  # processes: a link carries 128 MiB of calls without an answer, the gradients of 27 trainers
POINT_SECONDS = 60.0  # deadline
NEVER = 1_000_000


class Blank:
    """As many samples as MNIST has, of which only the number matters."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 28, 28), 0


def blank() -> tuple[Blank, Blank]:
    """The training and the test data: a DATASET."""
    return Blank(), Blank()


def settings(update_mode: str, servers: int) -> PsSettings:
    """Of a run that does not end, evaluate or save by itself."""
    return config.load(PsSettings, update_mode=update_mode, servers=servers, dataset="bench.posers_ps:blank",
                       epochs=NEVER, log_interval=NEVER, checkpoint_interval=86400)  # fmt: skip


class Posed(NamedTuple):
    """What a poser did: answers a second, all its answers, and its processor seconds."""

    rate: float
    answers: int
    cpu_s: float


@dataclass
class _Trainer:
    """A trainer that computes nothing: what it has in hand, and when its pushes were answered."""

    name: str
    number: int = 0  # of its next gradient
    version: int = 0
    batches: deque[int] = field(default_factory=deque)
    calls: list[Future[PartAnswer]] = field(default_factory=list)
    waiting: int = 0  # of them
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
        self._ready: queue.SimpleQueue[_Trainer] = queue.SimpleQueue()
        self.posed = [_Trainer(name) for name in names]
        self._lock = threading.Lock()

    def ask(self) -> None:
        """Asks for each trainer's first assignment, and waits for all: until then the servers are loading."""
        for posed in self.posed:
            self._send(posed, BatchReport(0, 0), [None] * len(self._parts))
        for _ in self.posed:
            self._take(self._next(time.perf_counter() + POINT_SECONDS))

    def run(self, seconds: float) -> float:
        """Answers a second, of all trainers; the first third of the time warms up."""
        started = time.perf_counter()
        ends, deadline = started + seconds, started + POINT_SECONDS / 2
        for posed in self.posed:
            posed.answered.clear()
            self._push(posed)
        while not (enough := self._are_enough()) or time.perf_counter() < ends:
            try:
                posed = self._next(ends if enough else deadline)
            except TimeoutError:
                if enough:
                    break  # sync: the other posers began earlier, and have stopped
                raise
            self._take(posed)
            self._push(posed)
        return sum(posed.rate(started + seconds / 3) for posed in self.posed)

    def _next(self, deadline: float) -> _Trainer:
        """The next trainer that was answered."""
        try:
            return self._ready.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            raise TimeoutError(f"too few answers within {POINT_SECONDS:g} s") from None

    def _push(self, posed: _Trainer) -> None:
        self._send(posed, BatchReport(posed.version, posed.batches.popleft(), loss=2.3), self._gradients)

    def _are_enough(self) -> bool:
        return all(len(posed.answered) > LEAST for posed in self.posed)

    def _send(self, posed: _Trainer, report: BatchReport, gradients: Sequence[Tensor | None]) -> None:
        key, posed.waiting = GradientKey(TrainerId(posed.name, 1, 0), posed.number), len(self._parts)
        posed.number += 1
        posed.calls = [
            wires.here().call(
                f"ps_{part.server}",
                Server.exchange,
                GradientPart(key, index, gradient, report if index == 0 else None),
            )
            for index, (part, gradient) in enumerate(zip(self._parts, gradients, strict=True))
        ]

        def answered(_: Future[PartAnswer]) -> None:
            with self._lock:
                posed.waiting -= 1
                if not posed.waiting:
                    self._ready.put(posed)

        for call in posed.calls:
            call.add_done_callback(answered)

    def _take(self, posed: _Trainer) -> None:
        for call in posed.calls:
            assignment = call.result().assignment  # it has come; raises what it raised
            if assignment is not None:
                posed.version = assignment.version
                posed.batches.extend(len(batch) for batch in assignment.batches)
        posed.answered.append(time.perf_counter())


POSER: list[_Poser] = []  # of this process, at this point


def prepare(update_mode: str, servers: int, names: tuple[str, ...]) -> None:
    """Poses as the trainers `names` from now on, which are given their first assignments."""
    POSER[:] = [_Poser(settings(update_mode, servers), names)]
    POSER[0].ask()


def pose(seconds: float) -> Posed:
    """Pushes for about `seconds` seconds."""
    used = time.process_time()
    rate = POSER[0].run(seconds)
    return Posed(rate, sum(len(each.answered) for each in POSER[0].posed), time.process_time() - used)
