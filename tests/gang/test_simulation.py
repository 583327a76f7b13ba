"""Gang and members together against random schedules, then the schedules against broken rules.

SCHEDULES=10000 plays so many schedules instead of 300, SCHEDULES_FROM=N begins with seed N.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rolecall.gang
from tests.simulation.ambushes import PHASES
from tests.simulation.explore import explore, replay, run
from tests.simulation.rules import SAFE
from tests.simulation.simulation import Code, Simulation
from tests.simulation.story import Violation

SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
SCHEDULES_FROM = int(os.environ.get("SCHEDULES_FROM", "0"))
LIMIT = 3000  # of schedules in which a broken rule shows


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
        assert {"freeze supervisor", "second coordinator kept out", "number refused by the disk"} <= faults
        assert {"slow disk", "hanging disk"} <= faults
        assert {f"cut for good ({way})" for way in ("to", "from", "both")} <= faults


def test_a_schedule_of_200_ranks() -> None:
    """RANKS=200 `make simulate` plays more of them."""
    result = run(1, ranks=200)
    assert result.generations


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert Simulation(7).run() == Simulation(7).run()


OLD_WORKERS = r"old worker believed alive|runs beside generation"
MUTATIONS = {
    name: (before[2:], after[2:], OLD_WORKERS if promise == "? OLD WORKERS" else promise[2:])
    for name, before, after, promise in (
        block.splitlines() for block in (Path(__file__).parent / "mutations.list").read_text().split("\n\n")[1:]
    )
}


def mutant(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> Code:
    """The code under test, with `before` replaced by `after` in one of its modules."""
    names = ("budget", "roster", "directives", "admission", "generation", "requests", "ending", "gang", "member")
    sources = {name: (Path(rolecall.gang.__file__).parent / f"{name}.py").read_text() for name in names}
    assert sum(source.count(before) for source in sources.values()) == 1, f"{before!r} is not there, or twice"
    modules = {}
    first = next(place for place, name in enumerate(names) if before in sources[name])
    for name in names[first:]:  # and those that may import it
        module = modules[name] = ModuleType(f"rolecall.gang.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(sources[name].replace(before, after), f"{name}.py", "exec"), module.__dict__)
    code = Code()
    gang = modules["gang"].Gang if "gang" in modules else code.gang
    member = modules["member"].Member if "member" in modules else code.member
    budget = modules["budget"].after_restart if "budget" in modules else code.after_restart
    return Code(gang, member, budget)


# a seed that shows what is broken, where the first such schedule is a late one: it is played before the others
SHOWN_BY = {
    "any report of a stop is believed": 100,
    "no wait for an earlier coordinator's generation": 112,
    "no wait for a rank that lives on elsewhere": 970,
    "who has another's assigned place is taken for that one": 4503,
    "a new coordinator does not know DONE": 92,
    "a generation starts with the members of when its number was written": 1389,
    "a drain that comes with the first directive is lost": 360,
    "a heartbeat from before the directive to stop is believed": 47,
    "an earlier incarnation is not remembered": 28,
    "no fence": 589,
    "the fence is longer than a lease": 1636,
    "deaths are free": 21,
    "a new coordinator does not know what was spent": 72,
    "a verdict is forgotten": 2876,
    "a loss of an earlier part is believed": 10093,
    "a member that left by itself is not noticed": 1168,
    "one coordinator a directory": 206,
    "one writer a directory": 904,
    "a writer looks at the newest number": 300,
    "the store's keys carry the number": 1722,
    "who waits for the writer's lock in vain has done no wrong": 392,
}


def a_violation(broken: str, limit: int, **arguments: Any) -> str:
    seeds = [SHOWN_BY[broken]] if broken in SHOWN_BY else []
    for seed in (*seeds, *range(limit)):
        try:
            Simulation(seed, **arguments).run()
        except Violation as violation:
            return str(violation)
    return f"none in {limit} schedules"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_schedules_find(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, promise = MUTATIONS[mutation]
    violation = a_violation(mutation, LIMIT, code=mutant(before, after, monkeypatch))
    print(violation.strip())
    assert re.search(promise, violation)


LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "a worker ends with its supervisor": ({"orphans_end": False}, OLD_WORKERS),
    "one coordinator a directory": (
        {"coordinator_lock": False},
        # members are split between two
        r"another coordinator runs one|begins after generation|not training|could go on",
    ),
    "one writer a directory": ({"writer_lock": False}, r"writes after generation \d+ has read"),
    "a writer looks at the newest number": ({"write_fence": False}, r"writes, and generation \d+ had begun"),
    "the store's keys carry the number": ({"prefix": False}, r"workers of generations \d+ and \d+ meet"),
    "who waits for the writer's lock in vain has done no wrong": (
        {"locked_out": "refused"},
        r"failed after 1 failures",
    ),
}


@pytest.mark.parametrize("safeguard", LEFT_OUT)
def test_the_schedules_find_what_is_left_out(safeguard: str) -> None:
    changes, promise = LEFT_OUT[safeguard]
    violation = a_violation(safeguard, LIMIT, safeguards=replace(SAFE, **changes))
    print(violation.strip())
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
