"""How fast `ps` is beside one process without RPC, beside DistributedDataParallel and beside the tutorial's way: `make
bench-ps`. All in one run.

Rates are samples a second over all trainers, in the middle of a run: without start-up and checkpoints. Each epoch is
evaluated beside the training, and by the one process after it. A shared machine is not equally fast all the time, so
the candidates take turns, a ratio is that of neighbours in time, and the median of the rounds' ratios counts. With
BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console

from bench import command, ddp_ps, launch, local_ps, rolecall_ps, tutorial_ps
from bench.display import Display
from bench.results_ps import BARRED, CANDIDATES, ENDS, MODES, TRAINERS, Measured, tables
from rolecall import config
from rolecall.jobs.ps import PsSettings, model

ACCURACY_TRAINERS = (1, 2, 4)
DDP_EPOCHS = 6  # of each measurement of DDP


class Bench:
    """Runs the measurements one after the other, with a display of how far they are."""

    def __init__(self, rounds: int, quick: bool, console: Console) -> None:
        self.rounds = rounds
        self.measured = Measured(parameters=sum(p.numel() for p in model.build(config.load(PsSettings)).parameters()))
        self.accuracy_trainers = (TRAINERS,) if quick else ACCURACY_TRAINERS
        steps = rounds * (2 * len(CANDIDATES) + 3 * len(BARRED) + 2) + 1 + sum(map(len, map(self._trainers, ENDS)))
        self._display = Display(steps, console, self.measured.busy_percent)

    def run(self) -> Measured:
        """Everything. Raises RuntimeError or TimeoutError where a run fails."""
        with self._display:
            for number in range(1, self.rounds + 1):
                self._round(f", round {number}")
            self._display.step("forward and backward pass", lambda on: local_ps.pass_seconds(TRAINERS),
                               partial(setattr, self.measured, "pass_seconds"),
                               lambda value: f"{1000 * value:.2f} ms")  # fmt: skip
            for mode in ENDS:
                for trainers in self._trainers(mode):
                    self._accuracy(mode, trainers)
        return self.measured

    def _round(self, name: str) -> None:
        measured, rate = self.measured, "{:,.0f} samples/s".format
        measured.local.append([])
        measured.tutorial.append([])

        def local() -> None:
            self._display.step("one process" + name, lambda on: local_ps.samples_per_s(),
                               measured.local[-1].append, rate)  # fmt: skip

        def ddp(beside: str) -> None:
            self._display.step("DDP" + name, lambda on: ddp_ps.samples_per_s(TRAINERS, DDP_EPOCHS),
                               measured.ddp[beside][-1].append, rate)  # fmt: skip

        for candidate, (variables, epochs) in CANDIDATES.items():
            local()
            measure = partial(_throughput, epochs, variables)
            if candidate in BARRED:
                measured.ddp[candidate].append([])
                ddp(candidate)
            self._display.step(candidate + name, measure, measured.throughput[candidate].append,
                               lambda run: rate(run.samples_per_s))  # fmt: skip
            if candidate in BARRED:
                ddp(candidate)
                self._display.step("tutorial" + name, lambda on: tutorial_ps.samples_per_s(),
                                   measured.tutorial[-1].append, rate)  # fmt: skip
        local()
        self._display.step("one process, memory kept" + name, lambda on: local_ps.samples_per_s(kept=True),
                           measured.local_kept.append, rate)  # fmt: skip

    def _trainers(self, mode: str) -> tuple[int, ...]:
        """Whose accuracy is measured: with local steps, that of documented settings for as many."""
        return self.accuracy_trainers if mode in MODES else (TRAINERS,)

    def _accuracy(self, mode: str, trainers: int) -> None:
        self._display.step(
            f"accuracy, {mode}, {trainers} trainers",
            lambda on: rolecall_ps.accuracy(trainers, on, **ENDS[mode]),
            lambda run: self.measured.accuracy[mode].update({trainers: run}),
            lambda run: f"{run.accuracy:.2%} in {run.seconds:.0f} s",
        )


def _throughput(epochs: int, variables: dict[str, Any], on: Callable[[str], None]) -> rolecall_ps.Throughput:
    return rolecall_ps.throughput(TRAINERS, epochs, on, **variables)


def main(argv: list[str] | None = None) -> int:
    def measure(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(PsSettings)
        return Bench(arguments.rounds, arguments.quick, console).run()

    return command.run("ps", __doc__, "accuracy of 2 trainers only", measure, tables, argv, 3)


if __name__ == "__main__":
    sys.exit(main())
