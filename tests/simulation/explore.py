"""Playing schedules: one, many with progress and a summary, or one again with its whole story."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable

from tests.simulation.rules import SAFE, Safeguards
from tests.simulation.simulation import Simulation
from tests.simulation.story import Result, Violation


def run(seed: int, safeguards: Safeguards = SAFE, ranks: int = 0) -> Result:
    """Play the schedule of `seed`. Raises Violation, with the whole story."""
    try:
        return Simulation(seed, safeguards, ranks=ranks).run()
    except Violation:
        Simulation(seed, safeguards, trace=True, ranks=ranks).run()
        raise  # it did not happen again: the simulation is not a function of its seed


def play(seeds: range, progress: Callable[[int], None], safeguards: Safeguards, ranks: int) -> tuple[list[Result], str]:
    """The schedules' results, up to the first that breaks a promise, and which one that was."""
    results = []
    for seed in seeds:
        try:
            results.append(Simulation(seed, safeguards=safeguards, ranks=ranks).run())
        except Violation as violation:
            return results, str(violation).strip()
        progress(len(results))
    return results, ""


def summary(results: list[Result], seconds: float) -> str:
    """What was played, in lines."""

    def spelled(counts: Counter[str]) -> str:
        return ", ".join(f"{what} {count:,}" for what, count in sorted(counts.items()))

    faults, events = Counter[str](), Counter[str]()
    for result in results:
        faults.update(result.faults)
        events.update(result.events)
    slowest = max(results, key=lambda result: result.settled_after, default=None)
    rows = {
        "schedules": f"{len(results):,} in {seconds:.0f} s: {3600 * len(results) / seconds:,.0f} an hour on one core",
        "ended": spelled(Counter(result.state for result in results)),
        "generations": f"{sum(result.generations for result in results):,} started",
        "faults": spelled(faults),
        "gang events": spelled(events),
        "slowest": f"{slowest.settled_after:.1f} s after all was well (seed {slowest.seed})" if slowest else "-",
    }
    wrapped = (textwrap.fill(text, 100, subsequent_indent=" " * 15) for text in rows.values())
    return "\n".join(f"{name:15}{text}" for name, text in zip(rows, wrapped, strict=True))


def explore(schedules: int, seed: int, safeguards: Safeguards = SAFE, ranks: int = 0) -> int:
    """Play `schedules` of them from `seed` on, each with at least `ranks` ranks; the exit code."""
    started, every = time.monotonic(), max(1, schedules // 10)
    seeds = range(seed, seed + schedules)

    def print_progress(done: int) -> None:
        if done % every == 0:
            print(f"{done} of {schedules} schedules, {time.monotonic() - started:.0f} s", flush=True)

    used = time.process_time()
    results, broken = play(seeds, print_progress, safeguards, ranks)
    print(summary(results, time.process_time() - used))
    if broken:
        again = f"{seeds[len(results)]}" + (f" --ranks {ranks}" if ranks else "")
        print(f"\nA promise was broken. {broken}\nReplay it: {sys.executable} -m tests.simulation {again}")
        return 1
    print("Every promise was kept.")
    return 0


def replay(seed: int, safeguards: Safeguards = SAFE, ranks: int = 0) -> int:
    """Print the story of one schedule; the exit code."""
    simulation = Simulation(seed, safeguards=safeguards, trace=True, ranks=ranks)
    broken = ""
    try:
        result = simulation.run()
    except Violation as violation:
        broken = str(violation).partition("\n")[0]
    print("\n".join(simulation.story.lines))
    print(broken or result)
    return 1 if broken else 0
