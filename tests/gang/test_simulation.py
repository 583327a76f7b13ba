"""Random schedules against the cores, and against broken rules and safeguards.

SCHEDULES=10000 plays so many schedules instead of 300, SCHEDULES_FROM=N begins with seed N.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import mutants
from tests.simulation.ambushes import MOMENTS, PHASES
from tests.simulation.explore import explore, replay, run
from tests.simulation.mutants import OLD_WORKERS
from tests.simulation.rules import SAFE
from tests.simulation.simulation import Simulation
from tests.simulation.story import Violation

SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
SCHEDULES_FROM = int(os.environ.get("SCHEDULES_FROM", "1411"))  # from which on 300 reach all that is asserted
LIMIT = 3000  # of schedules in which a safeguard that is left out shows


@pytest.mark.timeout(120 + SCHEDULES / 10)
def test_schedules() -> None:
    """Every promise of tests/simulation/promises.py holds in every schedule; a failure prints its seed and story."""
    results = [run(seed) for seed in range(SCHEDULES_FROM, SCHEDULES_FROM + SCHEDULES)]
    states = {state: sum(result.state == state for result in results) for state in ("training", "finished", "failed")}
    slowest = max(results, key=lambda result: result.settled_after)
    generations = sum(result.generations for result in results)
    print(f"{SCHEDULES} schedules: {states}, {generations} generations")
    print(f"the slowest settled {slowest.settled_after:.1f} s after it was calm (seed {slowest.seed})")
    if SCHEDULES >= 300:  # they reach what they are to test
        assert all(states.values())
        events = {event for result in results for event in result.events}
        assert {"recovered", "draining", "stopped silent", "stopped drained", "lost left"} <= events
        assert {"joined", "lost lost", "lost replaced"} <= events
        faults = {what for result in results for what in result.faults}
        assert {f"ambush while {phase}" for phase in PHASES} <= faults
        assert {what.split()[1] for what in faults if what.startswith("ambush ")} >= {m.split()[0] for m in MOMENTS}
        assert {"freeze supervisor", "second coordinator kept out", "number refused by the disk"} <= faults
        assert {"rank 0's disk lost", "disk lost", "rank 0 on an old disk", "tear"} <= faults
        assert {"checkpoint brought back", "wait for a holder"} <= faults
        assert {"slow disk", "hanging disk", "jump clock", "no forks", "kill spares"} <= faults
        assert {f"cut for good ({way})" for way in ("to", "from", "both")} <= faults


def test_a_schedule_of_200_ranks() -> None:
    """RANKS=200 `make simulate` plays more of them."""
    result = run(1, ranks=200)
    assert result.generations


def test_a_schedule_is_a_function_of_its_seed() -> None:
    """Byte for byte, in every process."""
    command = [sys.executable, "-m", "tests.simulation", "2"]  # in which a checkpoint is brought back
    root = Path(__file__).parents[2]
    stories = [
        subprocess.run(command, capture_output=True, check=True, cwd=root, env={**os.environ, "PYTHONHASHSEED": salt})
        for salt in ("1", "2")
    ]
    assert stories[0].stdout == stories[1].stdout
    assert len(stories[0].stdout.splitlines()) > 20


MUTANTS = mutants.read()
SAMPLE = [name for name in MUTANTS if MUTANTS[name].found_by][:: len(MUTANTS) // 12 + 1]  # of `make simulate`'s


def test_the_mutants_are_in_the_cores() -> None:
    cores = [mutant.core for mutant in MUTANTS.values()]
    assert len(cores) >= 100
    assert sum(core != "gang" for core in cores) >= 60


@pytest.mark.parametrize("name", SAMPLE)
def test_the_mutant_is_caught(name: str) -> None:
    assert mutants.catch(MUTANTS[name])


# what is left out, what a schedule says then, and a seed that shows it
LEFT_OUT: dict[str, tuple[dict[str, Any], str, int]] = {
    "a worker ends with its supervisor": ({"orphans_end": False}, OLD_WORKERS, 49),
    "one coordinator a directory": (
        {"coordinator_lock": False},
        # members are split between two
        r"another coordinator runs one|begins after generation|is written after|not training|could go on",
        44,
    ),
    "one writer a directory": ({"writer_lock": False}, r"writes, and another one is the writer", 893),
    "a writer looks at the newest number": ({"write_fence": False}, r"writes, and generation \d+ had begun", 324),
    "a connection names the generation": ({"hello": False}, r"workers of generations \d+ and \d+ meet", 144),
    "who waits for the writer's lock in vain has done no wrong": (
        {"locked_out": "refused"},
        r"failed after 1 failures",
        224,
    ),
}


@pytest.mark.parametrize("safeguard", LEFT_OUT)
def test_the_schedules_find_what_is_left_out(safeguard: str) -> None:
    changes, promise, shown_by = LEFT_OUT[safeguard]
    violation = "none"
    for seed in (shown_by, *range(LIMIT)):
        try:
            Simulation(seed, safeguards=replace(SAFE, **changes)).run()
        except Violation as broken:
            violation = str(broken).strip()
            break
    print(violation)
    assert re.search(promise, violation)


def test_a_broken_promise_is_printed_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    unsafe = replace(SAFE, orphans_end=False)
    assert explore(100, 0, unsafe) == 1
    printed = capsys.readouterr().out
    seed = int(re.findall(r"tests\.simulation (\d+)$", printed, re.MULTILINE)[0])
    assert f"seed {seed}, at " in printed
    assert replay(seed, unsafe) == 1
    story, broken = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert "coordinator" in story
    assert broken.startswith(f"seed {seed}, at ")
