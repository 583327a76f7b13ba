"""What the programs of bench_llm.py report: lines of JSON that all their processes append to a file in BENCH_FOLDER.

Rolecall's job, the single process and the peers' programs report the same: an `Update` for each update by reward, a
`Score` for each accuracy, and a `Member` for each object of a role that was made, and again once it is in use.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER, FILE = "BENCH_FOLDER", "events"  # the variable, and the file there


@dataclass(frozen=True)
class Update:
    """The end of the update `step` on the monotonic clock, and all tokens that updates up to it have learned from. An
    update that is made again after a loss has its number again."""

    at: float
    step: int
    tokens: float


@dataclass(frozen=True)
class Score:
    """The accuracy after the update `step`."""

    step: int
    value: float


@dataclass(frozen=True)
class Member:
    """The member `number` of a role, in the process `pid`: its object was made or, if `active`, is in use."""

    at: float
    role: str
    number: int
    pid: int
    active: bool


KINDS = {"Update": Update, "Score": Score, "Member": Member}


def append(event: Update | Score | Member) -> None:
    """Adds a line to the file."""
    line = json.dumps({"kind": type(event).__name__, **asdict(event)}) + "\n"
    with Path(os.environ[FOLDER], FILE).open("ab", buffering=0) as file:  # one write: several processes append
        file.write(line.encode())


def updated(step: int, tokens: float) -> None:
    """An update by reward has ended."""
    append(Update(time.monotonic(), step, tokens))


def scored(step: int, value: float) -> None:
    """The accuracy was measured."""
    append(Score(step, value))


def made(role: str, number: int) -> None:
    """A process has made the member's object."""
    append(Member(time.monotonic(), role, number, os.getpid(), False))


def active(role: str, number: int) -> None:
    """The member's object is in use."""
    append(Member(time.monotonic(), role, number, os.getpid(), True))


class Events:
    """The lines of the file so far; `read` adds the new ones."""

    def __init__(self, path: Path) -> None:
        self.updates: list[Update] = []
        self.scores: list[Score] = []
        self.members: list[Member] = []
        self._path, self._offset = path, 0

    def read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._add(json.loads(line))

    def _add(self, row: dict[str, Any]) -> None:
        event = KINDS[row.pop("kind")](**row)
        if isinstance(event, Update):
            self.updates.append(event)
        elif isinstance(event, Score):
            self.scores.append(event)
        else:
            self.members.append(event)

    def pid(self, role: str, number: int) -> int | None:
        """The process of the member that is in use."""
        pids = [each.pid for each in self.members if each.active and (each.role, each.number) == (role, number)]
        return pids[-1] if pids else None

    def loads(self, role: str) -> list[Member]:
        """The objects of the role that were made."""
        return [each for each in self.members if each.role == role and not each.active]


# ---- figures


def between(updates: Sequence[Update], first: float, last: float) -> list[Update]:
    return [update for update in updates if first <= update.at <= last]


def tokens_per_second(updates: Sequence[Update]) -> float:
    """Of updates of which none was lost: from the end of the first to the end of the last. 0 for fewer than two."""
    if len(updates) < 2:
        return 0.0
    return (updates[-1].tokens - updates[0].tokens) / (updates[-1].at - updates[0].at)


def updates_per_second(updates: Sequence[Update], first: float, last: float) -> float:
    """By how many the number of the newest update has grown a second between two times: lost updates do not count."""
    before = [update.step for update in updates if update.at <= first]
    until = [update.step for update in updates if update.at <= last]
    return (until[-1] - before[-1]) / (last - first) if before else 0.0


def accuracy(scores: Sequence[Score], step: int, count: int = 3) -> float | None:
    """The mean of the last `count` accuracies up to the update `step`; of an update that was made again, the newest."""
    values = {score.step: score.value for score in scores if score.step <= step}
    newest = [values[each] for each in sorted(values)[-count:]]
    return sum(newest) / len(newest) if newest else None


def reloads_of_others(loads: Sequence[Member], kills: Sequence[int]) -> int:
    """How many of `loads`, since the first kill, no death of that very member explains. `kills` are the numbers of the
    members of that role that were killed."""
    numbers = {load.number for load in loads}
    surplus = {each: sum(load.number == each for load in loads) - kills.count(each) for each in numbers}
    return sum(max(0, count) for count in surplus.values())
