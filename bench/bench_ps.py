"""How fast `ps` is beside one process without RPC, beside DistributedDataParallel and beside the tutorial's way: `make
bench-ps`. All in one run.

Rates are samples a second over all trainers, in the middle of a run: without start-up and checkpoints. Each epoch is
evaluated beside the training, and by the one process after it. A shared machine is not equally fast all the time, so
the candidates take turns, a ratio is that of neighbours in time, and the median of the rounds' ratios counts. With
BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from bench import command, ddp_ps, growth_ps, launch, local_ps, rolecall_ps, round_trip, tutorial_ps
from bench.display import Display
from bench.results_ps import BARRED, BESIDE_DDP, CANDIDATES, MODES, TRAINERS, Measured, tables
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
        self.growth_trainers = (1, 4, 16, 64) if quick else growth_ps.TRAINERS
        a_round = 2 * len(CANDIDATES) + len(BARRED) + 2 * len(BESIDE_DDP) + 3
        steps = rounds * a_round + 4 + len(MODES) * len(self.accuracy_trainers)
        growths = len(growth_ps.MODES) * len(growth_ps.SERVERS)
        self._display = Display(steps + growths, console, self.measured.busy_percent)

    def run(self) -> Measured:
        """Everything. Raises RuntimeError or TimeoutError where a run fails."""
        with self._display:
            for number in range(1, self.rounds + 1):
                self._round(f", round {number}")
            self._limits()
            for mode in MODES:
                for trainers in self.accuracy_trainers:
                    self._accuracy(mode, trainers)
            for mode in growth_ps.MODES:
                for servers in growth_ps.SERVERS:
                    self._growth(mode, servers)
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
            if candidate in BESIDE_DDP:
                measured.ddp[candidate].append([])
                ddp(candidate)
            self._display.step(candidate + name, measure, measured.throughput[candidate].append, _rate_line)
            if candidate in BESIDE_DDP:
                ddp(candidate)
            if candidate in BARRED:
                self._display.step("tutorial" + name, lambda on: tutorial_ps.samples_per_s(),
                                   measured.tutorial[-1].append, rate)  # fmt: skip
        local()
        self._display.step("one process, memory kept" + name, lambda on: local_ps.samples_per_s(kept=True),
                           measured.local_kept.append, rate)  # fmt: skip
        self._display.step("tutorial, one thread" + name, lambda on: tutorial_ps.samples_per_s(threads=1),
                           measured.tutorial_one_thread.append, rate)  # fmt: skip

    def _limits(self) -> None:
        measured = self.measured

        def step(what: str, keep: str, measure: Callable[[], float]) -> None:
            self._display.step(what, lambda on: measure(), lambda value: setattr(measured, keep, value),
                               lambda value: f"{1000 * value:.2f} ms")  # fmt: skip

        step("forward and backward pass", "pass_seconds", lambda: local_ps.pass_seconds(TRAINERS))
        step("round trip", "round_trip_seconds", lambda: 1 / round_trip.calls_per_s(1, 1, 1, 1))
        step("round trip of the parameters", "exchange_seconds",
             lambda: local_ps.round_trip_seconds(1, measured.parameters))  # fmt: skip
        step(f"round trip of the parameters, {TRAINERS} at once", "exchanges_at_once_seconds",
             lambda: local_ps.round_trip_seconds(TRAINERS, measured.parameters))  # fmt: skip

    def _accuracy(self, mode: str, trainers: int) -> None:
        self._display.step(
            f"accuracy, {mode}, {trainers} trainers",
            lambda on: rolecall_ps.accuracy(trainers, on, update_mode=mode),
            lambda run: self.measured.accuracy[mode].update({trainers: run}),
            lambda run: f"{run.accuracy:.2%} in {run.seconds:.0f} s",
        )

    def _growth(self, mode: str, servers: int) -> None:
        def show(points: Sequence[growth_ps.Point]) -> str:
            at, most = growth_ps.saturation(points)
            return f"{most:,.0f} pushes/s at most, nearly that from {at} trainers on"

        self._display.step(
            f"growth, {mode}, SERVERS={servers}",
            lambda on: growth_ps.measure(mode, servers, self.growth_trainers, progress=on),
            self.measured.growth.extend, show,
        )  # fmt: skip


def _rate_line(run: rolecall_ps.Throughput) -> str:
    restarts = f", {run.restarts} restarts" if run.restarts else ""
    return f"{run.samples_per_s:,.0f} samples/s{restarts}"


def _throughput(epochs: int, variables: dict[str, Any], on: Callable[[str], None]) -> rolecall_ps.Throughput:
    return rolecall_ps.throughput(TRAINERS, epochs, on, **variables)


def main(argv: list[str] | None = None) -> int:
    def measure(rounds: int, quick: bool, console: Console) -> Measured:
        launch.clean_environment(PsSettings)
        return Bench(rounds, quick, console).run()

    return command.run("ps", __doc__, 3, "accuracy of 2 trainers only, less growth", measure, tables, argv)


if __name__ == "__main__":
    sys.exit(main())
