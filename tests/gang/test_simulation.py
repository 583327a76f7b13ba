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
        faults = {what for result in results for what in result.faults}
        assert {f"ambush while {phase}" for phase in PHASES} <= faults
        assert {"freeze supervisor", "second coordinator kept out", "number refused by the disk"} <= faults
        assert {"slow disk", "hanging disk"} <= faults
        assert {f"cut for good ({way})" for way in ("to", "from", "both")} <= faults


@pytest.mark.parametrize("seed", range(5))
def test_schedules_of_200_ranks(seed: int) -> None:
    """RANKS=200 `make simulate` plays more of them."""
    result = run(seed, ranks=200)
    assert result.generations


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert Simulation(7).run() == Simulation(7).run()


OLD_WORKERS = r"old worker believed alive|runs beside generation"
IDLE = "return self.heartbeat.worker.state not in ALIVE and self.heartbeat.epoch >= self.stop_epoch"
MUTATIONS = {
    "no wait for stopped workers": (IDLE, "return True", OLD_WORKERS),
    "any report of a stop is believed": (IDLE, "return self.heartbeat.worker.state not in ALIVE", OLD_WORKERS),
    "a lease is shorter than the fence": (
        "now - member.received_at > self.rules.lease:",
        "now - member.received_at > self.rules.lease / 2:",
        r"is given up after",
    ),
    "no wait for an earlier coordinator's generation": (
        "if waited < self._rules.lease:",
        "if False:",
        OLD_WORKERS,
    ),
    "no extra lease after the coordinator's own pause": (
        "if paused > self.rules.lease / 3:",
        "if False:",
        r"is given up after",
    ),
    "numbers are used again": (
        'Effect("begin", self.number + 1,',
        'Effect("begin", self.number or 1,',
        r"number 1 is written after 1",
    ),
    "numbers are forgotten": ("self.number = last\n", "self.number = 0\n", r"number \d+ is written after"),
    "an elastic rank's loss ends the generation": (
        "if not self._elastic(key) or not self.generation.connected:",
        "if True:",
        r"could go on",
    ),
    "workers that cannot meet are waited for": (
        "if not self._elastic(key) or not self.generation.connected:",
        "if not self._elastic(key):",
        r"not training",
    ),
    "kills are failures": ("worker.outcome in ERRORS and (cause", "(cause", r"failed (by what never happened|after)"),
    "failures are forgiven": ("worker.outcome in ERRORS and (cause", "False and (cause", r"not training"),
    "a drain is a success": ('outcome == "finished":', 'outcome in ("finished", "drained"):', r"has not finished"),
    "a heartbeat from before the directive to stop is believed": (
        "member.stop_epoch = self._epochs.newest",
        "pass",
        OLD_WORKERS,
    ),
    "no wait for a rank that lives on elsewhere": ("if now < self._fenced_at:", "if False:", OLD_WORKERS),
    "who has another's assigned place is taken for that one": (
        "return member.heartbeat.ordinal is not None or member.heartbeat.worker.generation >= self._last",
        "return True",
        OLD_WORKERS,
    ),
    "a new coordinator does not know DONE": (
        '"gathering" if done is None else "finished"',
        '"gathering"',
        r"had finished|begins after DONE",
    ),
    "an earlier incarnation is not remembered": (
        "before = self._newest.get(rank)",
        "before = None",
        r"refused: superseded|not training|two workers",
    ),
    "a generation starts before the disk has its number": (
        'elif on_disk or effect.kind != "begin":',
        "else:",
        r"generation \d+ begins, and the disk has",
    ),
    "a generation starts with the members of when its number was written": (
        "if self._advance(now) != effect:",
        "if self._advance(now) and False:",
        r"begins with other members than were written",
    ),
    "a number that nobody used is written again": (
        "self.number = max(self.number, effect.generation)  # given up",
        "pass",
        r"number (\d+) is written after \1",
    ),
    "two effects are written at once": (
        "if self._writing is None and due is not None:",
        "if due is not None:",
        r"number (\d+) is written after \1|DONE is written twice",
    ),
    "a drain that comes with the first directive is lost": (
        'if action.kind == "start" and directive.drain:',
        "if False:",
        r"was never told to drain",
    ),
    "no fence": ('return "stopped" if self.silence(now)', 'return "stopped" if False and now', OLD_WORKERS),
    "the fence is longer than a lease": (
        "self.silence(now) > self.rules.lease * FENCE else",
        "self.silence(now) > self.rules.lease * 1.3 else",
        OLD_WORKERS,
    ),
    "a directive to stop ends no worker": (
        'kind: ActionKind = "end"',
        'kind: ActionKind = "update"',
        r"not training|old worker|runs beside|two workers",
    ),
    "a changed report is not sent": (
        "            if same:",
        "            if True:",
        r"not training",
    ),
    "a list of members is that of any generation": (
        'return f"{coordinator}:{generation}"',
        "return coordinator",
        r"another generation's members",
    ),
    "a list that the member does not have is left out": (
        "beat.listed == name_of_list(coordinator, directive.generation)",
        "True",
        r"not training",
    ),
    "a directive's name leaves its epoch out": (
        'return f"{coordinator}:{directive.epoch}"',
        "return coordinator",
        r"not training|old worker|runs beside|two workers",
    ),
    "the job's end is not acknowledged": ("self.acknowledged |= directive.kind in OVER", "pass", r"not training"),
    "a failed request is not repeated": ("self.retries += 1", "self.over = True", r"not training|does not know"),
    "deaths are free": ("self._fruitless += 1", "pass", r"not training"),
    "a new coordinator does not know what was spent": ("if not killed:", "if True:", r"not training"),
    "a verdict is forgotten": (
        'self.state: GangState = "failed" if failed else',
        "self.state: GangState =",
        r"had failed|begins after FAILED",
    ),
    "rank 0 does not wait for the others": ("settled or self.hurried", "True", r"does not know"),
}


def mutant(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> Code:
    """The code under test, with `before` replaced by `after` in one of its modules."""
    names = ("compact", "budget", "roster", "admission", "directives", "generation", "gang", "member")
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
    "no wait for an earlier coordinator's generation": 958,
    "no wait for a rank that lives on elsewhere": 525,
    "who has another's assigned place is taken for that one": 958,
    "a new coordinator does not know DONE": 247,
    "a generation starts with the members of when its number was written": 1389,
    "a number that nobody used is written again": 118,
    "a drain that comes with the first directive is lost": 360,
    "a heartbeat from before the directive to stop is believed": 47,
    "an earlier incarnation is not remembered": 28,
    "no fence": 234,
    "the fence is longer than a lease": 1038,
    "deaths are free": 21,
    "a new coordinator does not know what was spent": 72,
    "a verdict is forgotten": 58,
    "one coordinator a directory": 206,
    "one writer a directory": 102,
    "a writer looks at the newest number": 393,
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
