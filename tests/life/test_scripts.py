"""The rules of a worker's life as scripts: `*.txt`, one rule each, named by it.

A script is a list of blocks. A block has commands, a line `----`, and what they print: the effects, and the status if
it has changed. `pytest tests/life --rewrite` writes the output instead of checking it: read the difference.

    rank ROLE spares=2 lease=6          a rank, whose role is `-` if the gang assigns one
    do KIND DIRECTIVE name=value ...    an action of its member for a directive, such as `do start run generation=3`
    check ROLE | detach PROBLEM | close
    forked 1 | not-forked 1 killed PROBLEM
    says 1 NAME name=value ...          the worker 1 sends a message
    exiting 1                           its process is over
    exits 1 CODE killer=... step=7      its process exits; CODE is a number, or `?`
    traces 1                            the worker 1 records a trace
    kill 1 OUTCOME | fail 1 PROBLEM | dumped 1 | handed-over
    wait 2s | sleep 100s                time passes; this process is suspended
    heard 1                             when it last sent something?

A script that begins with `worker` is about the worker's own side:

    worker stays hook_limit=10          a worker; without `stays` it ends with its generation
    attach 3/1 | detach                 orders; 3/1 is generation 3, part number 1
    met 3/1 | not-met 3/1 lost PROBLEM  its workers have met; they have not, `lost` since one is gone, or `failed`
    provided hook                       its object is made, which has a method `attached`
    attached 3/1 failed PROBLEM         that has returned; or it has raised, `lost` or `failed`
    next-run | ran                      its main thread asks for the part to run for; the function has returned
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from rolecall.declare.task import Attachment, Peer
from rolecall.gang.member import Action
from rolecall.gang.protocol import Directive
from rolecall.life import parts, process
from rolecall.life.parts import Failure, PartId, WorkerParts
from rolecall.life.process import Exit
from rolecall.life.workers import Batch, Do, Make, RankWorkers, SpareRules, Times
from rolecall.messages import worker as messages

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
MESSAGES: dict[str, Any] = {
    "report": messages.Report,
    "loaded": messages.Loaded,
    "connected": messages.Connected,
    "detached": messages.Detached,
    "drain-refused": messages.DrainRefused,
    "peer-lost": messages.PeerLost,
    "stuck": messages.Stuck,
    "result": messages.Result,
}
MEMBERS = (("lead", 0), ("worker", 1), ("worker", 2))
QUIET = {"rows", "long_calls", "summary"}  # what is printed of no message


def value_of(text: str) -> Any:
    if key := re.fullmatch(r"(\w+):(\d+)", text):
        return ((key[1], int(key[2])),)
    return int(text) if re.fullmatch(r"-?\d+", text) else text == "true" if text in ("true", "false") else text


def options(words: list[str]) -> dict[str, Any]:
    return {name: value_of(value.replace("_", " ")) for name, _, value in (word.partition("=") for word in words)}


def shown(effect: Any) -> str:
    """An effect or a message: its name, and what it says."""
    is_message = isinstance(effect, Struct)
    values = {name: getattr(effect, name) for name in (effect.__struct_fields__ if is_message else vars(effect))}
    if attachment := values.pop("attachment", None):
        lost = ",".join(attachment.lost)
        values |= {"generation": attachment.generation, "join": attachment.me.join, "lost": lost}
    said = [f"{name}={value}" for name, value in values.items() if value and name not in QUIET]
    return " ".join([re.sub(r"(?<!^)(?=[A-Z])", "-", type(effect).__name__).lower(), *said])


class World:
    """A rank's workers, driven by a script."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers: RankWorkers
        self.status, self.numbers = "", "step 0, 0 lost"

    def run(self, line: str) -> list[str]:
        """Carries out a command. Returns what it prints."""
        command, *words = line.split()
        batch = getattr(self, "_" + command.replace("-", "_"))(*words)
        return [batch] if isinstance(batch, str) else self.printed(batch) if batch else []

    def printed(self, batch: Batch) -> list[str]:
        lines = []
        for effect in batch.effects:
            match effect:
                case Do(number, process.Send(message)):
                    lines.append(f"{number}: send {shown(message)}")
                case Do(number, process.Record(rows)):
                    lines += [f"{number}: record"] if rows else []
                case Do(number, other):
                    lines.append(f"{number}: {shown(other)}")
                case Make(number, place, attachment, check):
                    what = "check" if check else f"generation {attachment.generation}" if attachment else "load"
                    lines.append(f"{number}: make {place[0]}_{place[1]} {what}")
                case _:
                    lines.append(shown(effect))
        status = self.workers.status()
        said = f"{status.state} in {status.generation}/{status.join}"
        said += f", {status.outcome}" * bool(status.outcome) + f": {status.error}" * bool(status.error)
        if said != self.status:
            assert batch.changed or self.status == "", "a changed status is reported"
            self.status = said
            lines.append(f"-> {said}")
        numbers = f"step {status.step}, {len(status.lost_peers)} lost"
        if numbers != self.numbers:
            self.numbers = numbers
            lines.append(f"-> {numbers}{', at once' * batch.changed}")
        if batch.deadline < math.inf:
            lines.append(f"until {batch.deadline:g} s")
        return lines + ["done"] * batch.done

    def _rank(self, role: str, *words: str) -> None:
        numbers = {"spares": 0, "lease": 6, "phase_timeout": 1800} | options([*words])
        spares = numbers.pop("spares")
        times, rules = Times(numbers["lease"], numbers["phase_timeout"]), SpareRules(spares, pause=1)
        self.workers = RankWorkers("" if role == "-" else role, times, spares=lambda _: rules)
        self.status, self.numbers = "none in 0/0", "step 0, 0 lost"

    def _do(self, kind: Any, directive: Any, *words: str) -> Batch:
        fields = {"role": "worker", "ordinal": 1, "epoch": 1, "members": MEMBERS} | options([*words])
        return self.workers.carry_out(Action(kind, Directive(kind=directive, **fields)), self.now)

    def _check(self, role: str = "") -> Batch:
        return self.workers.check(role, self.now)

    def _detach(self, *problem: str) -> Batch:
        return self.workers.detach(self.now + 1, " ".join(problem), self.now)

    def _traces(self, number: str) -> None:
        self.workers.lives[int(number)].traced = True

    def _close(self) -> Batch:
        return self.workers.close(self.now)

    def _forked(self, number: str) -> Batch:
        return self.workers.forked(int(number), self.now)

    def _not_forked(self, number: str, why: str, *problem: str) -> Batch:
        return self.workers.not_forked(int(number), " ".join(problem), self.now, killed=why == "killed")

    def _says(self, number: str, name: str, *words: str) -> Batch:
        defaults = {"report": {"step": 0}, "stuck": {"stacks": ""}, "peer-lost": {"peer": Peer("worker", 2, 2)}}
        fields = defaults.get(name, {}) | options([*words])
        return self.workers.received(int(number), MESSAGES[name](**fields), self.now)

    def _exits(self, number: str, code: str, *words: str) -> Batch:
        ending = Exit(None if code == "?" else int(code), **options([*words]))
        return self.workers.exited(int(number), ending, self.now)

    def _exiting(self, number: str) -> None:
        self.workers.exiting(int(number))

    def _kill(self, number: str, outcome: Any) -> Batch:
        return self.workers.kill(int(number), outcome, self.now)

    def _fail(self, number: str, *problem: str) -> Batch:
        return self.workers.fail(int(number), " ".join(problem), self.now)

    def _dumped(self, number: str) -> Batch:
        return self.workers.dumped(int(number), self.now)

    def _handed_over(self) -> Batch:
        return self.workers.handed_over(self.now)

    def _heard(self, number: str) -> str:
        return f"heard {self.workers.lives[int(number)].last_heartbeat}"

    def _wait(self, seconds: str) -> Batch:
        self.now += float(seconds.rstrip("s"))
        return self.workers.tick(self.now)

    def _sleep(self, seconds: str) -> None:
        self.now += float(seconds.rstrip("s"))
        self.workers.suspended(float(seconds.rstrip("s")))


class Inside:
    """A worker's own side, driven by a script."""

    def __init__(self) -> None:
        self.now = 0.0
        self.parts: WorkerParts

    def run(self, line: str) -> list[str]:
        """Carries out a command. Returns what it prints."""
        command, *words = line.split()
        batch = getattr(self, "_" + command.replace("-", "_"))(*words)
        if not isinstance(batch, parts.Batch):
            return [f"-> {batch}"] if batch else []
        lines = []
        for effect in batch.effects:
            match effect:
                case parts.Report(message):
                    lines.append(f"report {shown(message)}")
                case parts.Meet(attachment):
                    lines.append(f"meet {attachment.generation}/{attachment.me.join}")
                case parts.Fail(error):
                    lines.append(f"fail {error}")
                case other:
                    lines.append(f"{shown(other).split()[0]} {other.part.generation}/{other.part.join}")
        return lines + [f"until {batch.deadline:g} s"] * (batch.deadline < math.inf)

    def _worker(self, *words: str) -> None:
        limit = options([word for word in words if "=" in word]).get("hook_limit", 1800)
        self.parts = WorkerParts(stays="stays" in words, hook_limit=limit)

    def _attach(self, part: str) -> parts.Batch:
        generation, join = map(int, part.split("/"))
        me = Peer("worker", 1, 1, join)
        return self.parts.attach(Attachment(generation, me, (me,)))

    def _detach(self) -> parts.Batch:
        return self.parts.detach()

    def _met(self, part: str) -> parts.Batch:
        return self.parts.met(part_of(part), self.now)

    def _not_met(self, part: str, why: str, *problem: str) -> parts.Batch:
        return self.parts.not_met(part_of(part), failure_of(why, problem))

    def _provided(self, hook: str = "") -> parts.Batch:
        return self.parts.provided(self.now, hook=bool(hook))

    def _attached(self, part: str, why: str = "", *problem: str) -> parts.Batch:
        return self.parts.attached(part_of(part), self.now, failure_of(why, problem) if why else None)

    def _next_run(self) -> str:
        return "{}/{}".format(*part) if (part := self.parts.next_run()) else "none"

    def _ran(self) -> None:
        self.parts.ran()

    def _wait(self, seconds: str) -> parts.Batch:
        self.now += float(seconds.rstrip("s"))
        return self.parts.tick(self.now)


def failure_of(why: str, words: tuple[str, ...]) -> Failure:
    problem = " ".join(words)
    return Failure(RuntimeError(problem), problem, lost=why == "lost")


def part_of(text: str) -> PartId:
    generation, join = map(int, text.split("/"))
    return PartId(generation, join)


def play(script: str) -> str:
    """`script` with what its commands print."""
    world, blocks = Inside() if script.startswith("worker") else World(), []
    for block in re.split(r"\n\s*\n", script.strip()):
        commands = block.partition("\n----")[0].splitlines()
        printed = [line for command in commands if not command.startswith("#") for line in world.run(command)]
        blocks.append("\n".join([*commands, "----", *printed]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, request: pytest.FixtureRequest) -> None:
    script = path.read_text()
    printed = play(script)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(printed)
    assert printed == path.read_text()


def test_scripts_are_there() -> None:
    assert len(SCRIPTS) > 20
