"""How fast `rnn` is beside one process and beside the tutorial's way: `make bench-rnn`. All in one run.

The shape is word_language_model's on wikitext-2. A shared machine is not equally fast all the time, so the candidates
take turns and the median of the rounds' ratios counts. With BENCH_JSON=FILE the numbers are written as JSON too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, launch, local_rnn, rolecall_rnn, tutorial_rnn
from bench.display import Display
from bench.launch import Speed
from rolecall.jobs.rnn import RnnSettings

STEPS = 40
TUTORIAL_STEPS = 8  # each takes a second
BYTES_STEPS = 3
TUTORIAL_BAR = 2.5  # times the tutorial's rate, at least
LOCAL_BAR = 0.9  # of one process, at least
BYTES_BAR = 50  # the tutorial's bytes over ours, at least
PERPLEXITY_BAR = 1.02  # of one process, at most


@dataclass
class Measured:
    """Rates in tokens a second and bytes a step, by round; `micro` is the rate by MICRO_BATCHES."""

    tutorial: list[float] = field(default_factory=list)
    tutorial_bytes: float = 0.0
    local: list[float] = field(default_factory=list)
    rolecall: list[tuple[Speed, float]] = field(default_factory=list)
    micro: dict[int, float] = field(default_factory=dict)
    perplexity: tuple[float, float] = (0.0, 0.0)  # and seconds
    local_perplexity: float = 0.0
    busy_percent: list[float] = field(default_factory=list)

    def rate(self, name: str) -> float:
        return statistics.median(one if isinstance(one, float) else one[0].per_s for one in getattr(self, name))

    @property
    def rolecall_bytes(self) -> float:
        return statistics.median(one[1] for one in self.rolecall)

    def bars(self) -> list[command.Bar]:
        times = statistics.median(r.per_s / t for (r, _), t in zip(self.rolecall, self.tutorial, strict=True))
        part = statistics.median(r.per_s / one for (r, _), one in zip(self.rolecall, self.local, strict=True))
        less = self.tutorial_bytes / self.rolecall_bytes
        worse = self.perplexity[0] / self.local_perplexity
        return [
            ("tokens/s", f"{times:.2f} x the tutorial's", f">= {TUTORIAL_BAR:g} x", times >= TUTORIAL_BAR),
            ("tokens/s", f"{part:.2f} of one process", f">= {LOCAL_BAR:g}", part >= LOCAL_BAR),
            ("bytes a step", f"1/{less:.0f} of the tutorial's", f"<= 1/{BYTES_BAR}", less >= BYTES_BAR),
            ("perplexity", f"{worse:.4f} of one process", f"<= {PERPLEXITY_BAR:g}", worse <= PERPLEXITY_BAR),
        ]

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        return {
            **{f"{name}_tokens_per_s": round(self.rate(name), 1) for name in ("tutorial", "local", "rolecall")},
            "tutorial_bytes_per_step": round(self.tutorial_bytes),
            "rolecall_bytes_per_step": round(self.rolecall_bytes),
            "local_perplexity": round(self.local_perplexity, 3),
            "rolecall_perplexity": round(self.perplexity[0], 3),
            "details": {
                **asdict(self),
                "bars": command.bars_json(self),
                "processors": os.cpu_count(),
            },
        }


def measure(rounds: int, micro: tuple[int, ...], console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a run fails."""
    results = Measured()
    display = Display(3 * rounds + len(micro) + 3, console, results.busy_percent)

    def show(run: tuple[Speed, float]) -> str:
        return f"{run[0].per_s:,.0f} tokens/s, {run[1] / 1e6:,.2f} MB a step"

    def rate(value: float) -> str:
        return f"{value:,.0f} tokens/s"

    with display:
        for number in range(1, rounds + 1):
            name = f", round {number}"
            display.step("tutorial" + name, lambda on: tutorial_rnn.measure(TUTORIAL_STEPS),
                         results.tutorial.append, rate)  # fmt: skip
            display.step("rolecall" + name, lambda on: rolecall_rnn.measure(STEPS, on), results.rolecall.append, show)
            display.step("one process" + name, lambda on: local_rnn.tokens_per_s(STEPS), results.local.append, rate)
        display.step("the tutorial's bytes", lambda on: tutorial_rnn.bytes_a_step(BYTES_STEPS),
                     lambda value: setattr(results, "tutorial_bytes", value),
                     lambda value: f"{value / 1e6:,.2f} MB a step")  # fmt: skip
        for parts in micro:
            display.step(f"MICRO_BATCHES={parts}", _with(parts),
                         lambda value, n=parts: results.micro.update({n: value}), rate)  # fmt: skip
        display.step("default run", rolecall_rnn.perplexity, lambda value: setattr(results, "perplexity", value),
                     lambda value: f"perplexity {value[0]:.2f} in {value[1]:.0f} s")  # fmt: skip
        display.step("default run in one process", lambda on: local_rnn.perplexity(),
                     lambda value: setattr(results, "local_perplexity", value),
                     lambda value: f"perplexity {value:.2f}")  # fmt: skip
    return results


def _with(parts: int) -> Callable[[Callable[[str], None]], float]:
    return lambda on: rolecall_rnn.measure(STEPS, on, MICRO_BATCHES=parts)[0].per_s


def tables(results: Measured) -> list[Table]:
    """The results for people."""
    shape = f"vocabulary {local_rnn.VOCABULARY:,}, width {local_rnn.WIDTH}, {local_rnn.LAYERS} layers, " \
            f"sequence {local_rnn.SEQUENCE}, batch {local_rnn.BATCH}"  # fmt: skip
    rates = command.table("", "tokens/s", "bytes a step", title=shape)
    rates.add_row("the tutorial's way", f"{results.rate('tutorial'):,.0f}", f"{results.tutorial_bytes:,.0f}")
    rates.add_row("one process", f"{results.rate('local'):,.0f}", "")
    rates.add_row("rnn", f"{results.rate('rolecall'):,.0f}", f"{results.rolecall_bytes:,.0f}")
    for parts, value in results.micro.items():
        rates.add_row(f"rnn, MICRO_BATCHES={parts}", f"{value:,.0f}", "")
    ends = command.table("", "perplexity", title="After the default run")
    ends.add_row("one process", f"{results.local_perplexity:.2f}")
    ends.add_row(f"rnn, {results.perplexity[1]:.0f} s", f"{results.perplexity[0]:.2f}")
    return [rates, ends]


def main(argv: list[str] | None = None) -> int:
    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        launch.clean_environment(RnnSettings)
        return measure(arguments.rounds, () if arguments.quick else (1, 2, 4), console)

    return command.run("rnn", __doc__, "the default MICRO_BATCHES only", run, tables, argv, 3)


if __name__ == "__main__":
    sys.exit(main())
