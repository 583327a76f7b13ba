"""The modes of `ps` on slow links: bytes, rates, and the time to the accuracy of `sync`. `make bench-wan`, as root.

Accuracy and bytes do not depend on the link, so they are measured on loopback, over several seeds. What an update takes
is measured on each link, over a few updates. The seconds to the target, which is the mean test accuracy of `sync` less
half a point, are `computed` of both, or `measured` where that takes a few minutes. Each rank has a link of its own
(bench/link), one server and two trainers share this machine's cores.

With BENCH_JSON=FILE each figure is written as it comes, and a rerun with the same file measures only what is missing or
has other settings; so a long benchmark can be run in parts. The keys of the file:

- `tasks`.TASK: `target_accuracy`; `modes`.MODE: `seeds` (how many), `accuracy` (mean), `points_from_sync`, `sent_bytes`
  and `received_bytes` (payload of one trainer in a whole training, mean), `bytes_of_sync` (both, over those of `sync`),
  `updates_to_target` (median over the seeds), `links`.LINK: `seconds_per_update`, `samples_per_s`, `seconds_to_target`
  and `how` (`measured` or `computed`).
- `uneven_ratios`.MODE and `int8_ratios`.int8: samples a second over those of `sync`, of `float32`, by round.
- `bars`, `busy_percent` (by others, before each measurement), `processors`, `failures` (by key, one line each).
- `runs`.KEY: each measurement with its `settings`. `accuracy/TASK/MODE/SEED`, `rate/TASK/MODE/LINK` and
  `whole/TASK/MODE/LINK` hold what wan_measure.py says; so do `uneven/MODE/ROUND` and `int8/MODE/ROUND`, as `rate`;
  `link/LINK` holds what was promised and what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from rich.console import Console

from bench import command, launch, wan_measure, wan_tasks
from bench.link import check
from bench.link.links import LINKS
from bench.peers.store import Kept
from bench.wan_results import FAST, FASTEST, SEEDS, SLOW, Measured, Run, Store, tables
from rolecall.jobs.ps import PsSettings
from rolecall.rank.zygote import Zygote, ZygoteError
from tests.chaos.network import NetworkError

PARTS = ("link", "accuracy", "rate", "whole", "uneven", "int8")
LOSSY = "20mbit-loss"  # which is not measured unless it is asked for
UPDATES, SECONDS, DEADLINE = 2, 10.0, 420.0  # of a rate
QUICK = {"tasks": ["digits"], "modes": ["sync", "local-int4"], "links": [SLOW], "seeds": [1],
         "only": ["link", "accuracy", "rate"]}  # fmt: skip
QUICK_EPOCHS = 12
WHOLE_SECONDS = 150.0  # a training to the target that is expected to take longer is computed only
UNEVEN_TRAINERS = 4  # of which one is slower
PAUSED = {"MODEL": f"{wan_tasks.__name__}:Paused", "BATCH_SIZE": 8}
UNEVEN = {"sync": {**PAUSED}, "async": {**PAUSED, "UPDATE_MODE": "async"}}
INT8 = {"float32": {"UPDATE_MODE": "sync"}, "int8": {"UPDATE_MODE": "sync", "WIRE_DTYPE": "int8"}}


class Bench:
    """Measures what is selected and missing, one after the other. What fails is kept as a failure, and the rest goes
    on.
    """

    def __init__(self, measured: Measured, only: list[str], rounds: int, quick: bool, console: Console) -> None:
        self.measured, self.only, self.rounds, self.quick, self._console = measured, only, rounds, quick, console
        self._display = Kept(self._most(), console, measured.busy_percent)
        self._zygote: Zygote | None = None

    def _most(self) -> int:
        """Measurements, but for those of `whole`, which are known late."""
        m = self.measured
        pairs = len(m.tasks) * len(m.modes)
        counts = {"link": len(m.links), "accuracy": pairs * len(m.seeds), "rate": pairs * len(m.links),
                  "uneven": self.rounds * len(UNEVEN), "int8": self.rounds * len(INT8)}  # fmt: skip
        return sum(counts.get(part, 0) for part in self.only)

    def run(self) -> Measured:
        """Everything."""
        with contextlib.ExitStack() as stack:
            if {"accuracy", "uneven"} & set(self.only):
                self._zygote = stack.enter_context(Zygote("ps"))
            stack.enter_context(self._display)
            for part, do in zip(PARTS, (self._links, self._accuracies, self._rates, self._wholes, self._unevens,
                                        self._int8), strict=True):  # fmt: skip
                if part in self.only:
                    do()
        return self.measured

    def _step(self, key: str, settings: Run, measure: Callable[[wan_measure.News], Run], show: str) -> None:
        """Unless it is there. `show` is a format of what was measured."""
        store = self.measured.store
        if store.has(key, settings):
            return

        def guarded(on: wan_measure.News) -> Run:
            try:
                return measure(on)
            except (NetworkError, ZygoteError) as error:
                raise RuntimeError(str(error)) from error

        def keep(run: Run) -> None:
            store.runs[key] = {**run, "settings": settings}
            store.failures.pop(key, None)

        try:
            self._display.step(key, guarded, keep, lambda run: show.format(**run))
        except (RuntimeError, TimeoutError) as error:
            store.failures[key] = (str(error).splitlines() or [type(error).__name__])[0][:400]
            self._console.print(f"{store.failures[key]}", markup=False, highlight=False)
        self.measured.save()

    def _pairs(self) -> Iterator[tuple[str, str]]:
        return ((task, mode) for task in self.measured.tasks for mode in self.measured.modes)

    def _settings(self, task: str, mode: str) -> Run:
        return {**wan_tasks.settings(task, mode), **({"EPOCHS": QUICK_EPOCHS} if self.quick else {})}

    def _links(self) -> None:
        for link in self.measured.links:
            self._step(f"link/{link}", {}, lambda on, link=link: check.check(LINKS[link]).to_json(),  # type: ignore[misc]
                       "{measured[bits_per_s]:,.0f} bits/s, {measured[round_trip_s]:.4f} s")  # fmt: skip

    def _accuracies(self) -> None:
        assert self._zygote
        for seed in self.measured.seeds:
            for task, mode in self._pairs():
                settings = self._settings(task, mode)
                self._step(f"accuracy/{task}/{mode}/{seed}", settings,
                           partial(wan_measure.accuracy, settings, seed, self._zygote),
                           "{accuracy:.2%} after {updates} updates, {sent_bytes:,.0f} bytes up, "
                           "{received_bytes:,.0f} down")  # fmt: skip

    def _rates(self) -> None:
        for link in self.measured.links:
            for task, mode in self._pairs():
                settings = self._settings(task, mode)
                self._step(f"rate/{task}/{mode}/{link}", settings,
                           partial(wan_measure.rate, settings, link, UPDATES, SECONDS, DEADLINE),
                           "{seconds_per_update:.3f} s an update, {samples_per_s:,.1f} samples/s")  # fmt: skip

    def _wholes(self) -> None:
        """Of `sync` and of the mode that is soonest, where it does not take too long."""
        measured = self.measured
        for link in (SLOW, FAST):
            for task in measured.tasks if link in measured.links else ():
                for mode in ("sync", measured.soonest(task, link)):
                    if mode and (seconds := measured.computed(task, mode, link)) <= WHOLE_SECONDS:
                        settings, target = self._settings(task, mode), measured.target(task)
                        self._step(f"whole/{task}/{mode}/{link}", settings,
                                   partial(wan_measure.whole, settings, link, measured.seeds[0], target,
                                           2 * seconds + 60),
                                   "{seconds:.1f} s to {target:.2%}")  # fmt: skip

    def _unevens(self) -> None:
        def measure(settings: Run, on: wan_measure.News) -> Run:
            return wan_measure.rate(settings, None, UPDATES, SECONDS, DEADLINE, on, UNEVEN_TRAINERS, self._zygote)

        self._turns("uneven", UNEVEN, measure)

    def _int8(self) -> None:
        def measure(settings: Run, on: wan_measure.News) -> Run:
            return wan_measure.rate(settings, FASTEST, UPDATES, SECONDS, DEADLINE, on)

        self._turns("int8", INT8, measure)

    def _turns(self, part: str, modes: dict[str, Run], measure: Callable[[Run, wan_measure.News], Run]) -> None:
        """Each in every round, in the other order in every second one."""
        for number in range(1, self.rounds + 1):
            for mode in modes if number % 2 else reversed(modes):
                self._step(f"{part}/{mode}/{number}", modes[mode], partial(measure, modes[mode]),
                           "{samples_per_s:,.1f} samples/s")  # fmt: skip


def _numbers(text: str) -> list[int]:
    """1-3,5 as [1, 2, 3, 5]. Raises ValueError."""
    bounds = [[int(end) for end in piece.split("-")] for piece in text.split(",")]
    return [number for ends in bounds for number in range(ends[0], ends[-1] + 1)]


def main(argv: list[str] | None = None) -> int:
    chosen: dict[str, Any] = {}
    usual = {"tasks": list(wan_tasks.TASKS), "modes": list(wan_tasks.MODES), "only": list(PARTS),
             "links": [name for name in LINKS if name != LOSSY], "seeds": list(range(1, SEEDS + 1))}  # fmt: skip
    known: dict[str, Iterable[str]] = {
        "tasks": wan_tasks.TASKS,
        "modes": wan_tasks.MODES,
        "links": LINKS,
        "only": PARTS,
    }

    def options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
        for name, values in known.items():
            parser.add_argument(f"--{name}", default="", help=f"some, with commas between them: {','.join(values)}")
        parser.add_argument("--seeds", default="", help=f"such as 1-3,5; 1-{SEEDS} otherwise")

        def accept(arguments: argparse.Namespace) -> None:
            chosen.update(usual | (QUICK if arguments.quick else {}))
            for name, values in known.items():
                wanted = [one for one in getattr(arguments, name).split(",") if one]
                if wrong := [one for one in wanted if one not in values]:
                    parser.error(f"--{name}: {wrong[0]!r} is none of {', '.join(values)}")
                chosen[name] = [one for one in values if one in wanted] or chosen[name]
            try:
                chosen["seeds"] = _numbers(arguments.seeds) if arguments.seeds else chosen["seeds"]
            except ValueError:
                parser.error(f"--seeds: {arguments.seeds!r} is not such as 1-3,5")

        return accept

    def run_all(rounds: int, quick: bool, console: Console) -> Measured:
        launch.clean_environment(PsSettings)
        only = chosen.pop("only")
        measured = Measured(Store.open("wan-quick" if quick else "wan"), **chosen)
        return Bench(measured, only, rounds, quick, console).run()

    return command.run("wan", __doc__, 3, "one task, two modes, one link, fewer epochs", run_all, tables, argv, options)


if __name__ == "__main__":
    sys.exit(main())
