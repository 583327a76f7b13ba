"""The rooms' ceilings: what carries a feature grows by itself, and is kept small by a number that a change must lower
elsewhere, or raise with a reason. Lines are taken away with parts, not by squeezing."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_ROOM = 100  # lines, or words, below a ceiling: what was taken away is not given to the next change

# lines of Python in each folder; a comment says why one was raised
ROOMS = {
    "rolecall": 2280,
    "rolecall/checkpoint": 2450,  # what members keep
    "rolecall/context": 4190,  # maps, first answers, what members keep, gradients across calls
    "rolecall/copies": 820,  # checkpoints that members hold, and how the newest comes back
    "rolecall/declare": 1730,  # settings that a program gives, the module that declares a job, engines
    "rolecall/export": 920,
    "rolecall/gang": 2330,
    "rolecall/inprocess": 1010,  # one process for debugging and tests
    "rolecall/jobs": 90,
    "rolecall/jobs/hybrid": 3000,
    "rolecall/jobs/ps": 2580,  # updates that do not depend on who is there
    "rolecall/jobs/rl": 4270,  # processes of episodes that end at any moment
    "rolecall/jobs/rnn": 1050,
    "rolecall/jobs/script": 190,
    "rolecall/launch": 6610,  # how runs from Python end, runs on five engines, ranks that leave a host or node, guards
    "rolecall/life": 1100,  # what rank decided before, and its table of states
    "rolecall/links": 900,  # the decisions of a map
    "rolecall/messages": 580,  # the declarations and codecs of six rooms
    "rolecall/observe": 680,
    "rolecall/observe/doctor": 1080,
    "rolecall/observe/page": 580,
    "rolecall/observe/sinks": 690,
    "rolecall/observe/stacks": 630,
    "rolecall/observe/trace": 810,
    "rolecall/rank": 4960,  # effects that raise, pauses, ends that are noticed before an order, or with the input
    "rolecall/record": 1430,
    "rolecall/torch_rpc": 960,
    "rolecall/tunnel": 2030,
    "rolecall/weights": 940,
    "rolecall/wire": 3300,  # serial methods, and what they wait for; waits that stand still; all links by a few threads
}
# lines of Python; words of Markdown in docs. docs: maps, members' state, services, tests, debugging, questions to a
# run's files; a page of ten minutes beside the reference; the same bits, of grpo too, copies, dead machines and pods
# bench: the programs beside Ray's and Monarch's, the loss of a machine
# tests: an end by a signal, runs in containers and on Slurm, the same bits, of grpo too, lost hosts of ps and grpo,
# nodes and disks, those also in simulation
TOTALS = {"tests": 58430, "bench": 10200, "tools": 2050, "docs": 51860}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def rooms() -> dict[str, int]:
    """The lines of each folder's own files."""
    counts: dict[str, int] = {}
    for path in (ROOT / "app" / "rolecall").rglob("*.py"):
        room = str(path.parent.relative_to(ROOT / "app"))
        counts[room] = counts.get(room, 0) + lines(path)
    return counts


def totals() -> dict[str, int]:
    counts = {name: sum(map(lines, (ROOT / name).rglob("*.py"))) for name in TOTALS if name != "docs"}
    return counts | {"docs": sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))}


def problems(counts: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """What is wrong with `counts`, a line each."""
    wrong = [f"{name} has no ceiling" for name in counts.keys() - ceilings.keys()]
    wrong += [f"{name} has a ceiling and is not there" for name in ceilings.keys() - counts.keys()]
    for name in counts.keys() & ceilings.keys():
        count, ceiling = counts[name], ceilings[name]
        if count > ceiling:
            wrong.append(f"{name} has {count:,}, {count - ceiling} over its ceiling of {ceiling:,}: take parts away")
        elif count < ceiling - MOST_ROOM:
            wrong.append(f"{name} has {count:,}: lower its ceiling of {ceiling:,}")
    return sorted(wrong)


def test_rooms_stay_below_their_ceilings() -> None:
    assert problems(rooms(), ROOMS) == []
    assert problems(totals(), TOTALS) == []


def test_what_is_over_its_ceiling_far_below_it_or_without_one_is_named() -> None:
    ceilings = {"a": 500, "b": 500, "c": 500, "d": 500}
    assert problems({"a": 500, "b": 501, "c": 399, "e": 1}, ceilings) == [
        "b has 501, 1 over its ceiling of 500: take parts away",
        "c has 399: lower its ceiling of 500",
        "d has a ceiling and is not there",
        "e has no ceiling",
    ]
