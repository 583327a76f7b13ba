"""The gang's rules as scripts: `*.txt`, one rule each, named by it.

A script is a list of blocks. A block has commands, a line `----`, and what they print. `pytest tests/gang --rewrite`
writes the output instead of checking it: read the difference before you commit it.

    gang agent=1 observer=2/1/4 lease=6   a new gang: roles (count/minimum/maximum if elastic) and rules
    gang agent=1 observer=2/1/4,stays,required,restarts:3,backoff:10       a role with more than its numbers
    join observer_0 node=a as=twin        a rank registers; `observer` without an ordinal, or `?` without a role
    start                                 all ranks join and obey, and rank 0's worker makes step 1; prints nothing
    obey observer_0 | settle              one, or all until nothing changes, carry out their directives
    beat agent_0 step=7 phase=saving      a heartbeat with changes
    beat agent_0 lost_peers=(observer:1)  of peers: `replaced_peers`, and `observer:1/3` if its join has the number 3
    end observer_0 killed error=...       its worker ends; `...` is the rest of the line
    gone observer_0 | crash observer_0    it sends nothing until its next `beat` | its process is reported to have ended
    wait 6s observer_0                    time passes, and all but the named ranks send heartbeats
    sleep 100s | tick                     the coordinator is suspended | time stands still
    next                                  waits for the next generation, or the job's end
    disk refuses | hangs | takes          what the disk does from now on
    resumed 40                            rank 0's worker starts from the checkpoint of that step
    missing | settled | epochs            questions
    repeat 3: end agent_0 killed; next    so many times; prints the output of the last time

Each command prints transitions and events, what is put on disk, and directives that changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from rolecall.gang.directives import text_of
from rolecall.gang.protocol import Budget, Effect, Join, LostPeer, RejectedError, RoleSpec, Rules, Verdict, name_of
from tests.gang.gangs import FakeMember, Play

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
DEFAULTS = {"max_restarts": 100, "longest_pause": 0.0}  # the restart budget has scripts of its own
Disk = Literal["takes", "refuses", "hangs"]


def peers_of(text: str, replace: bool) -> tuple[LostPeer, ...]:
    """Lost peers, such as `(observer:1/3)`."""
    found = re.findall(r"(\w+):(\d+)(?:/(\d+))?", text)
    return tuple(LostPeer(Join(role, int(ordinal), int(number or 0)), replace) for role, ordinal, number in found)


def value_of(text: str) -> Any:
    """A number, a list of keys in parentheses such as `(observer:0)`, `true`, or text."""
    if text.startswith("("):
        return tuple((role, int(ordinal)) for role, ordinal in re.findall(r"(\w+):(\d+)", text))
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else text


def options(words: list[str]) -> dict[str, Any]:
    values = dict[str, Any]()
    for name, _, value in (word.partition("=") for word in words):
        if name in ("lost_peers", "replaced_peers"):
            values["lost_peers"] = values.get("lost_peers", ()) + peers_of(value, name == "replaced_peers")
        else:
            values[name] = value_of(value)
    return values


def role_of(name: str, text: str) -> RoleSpec:
    numbers, *more = text.split(",")
    count, *bounds = map(int, numbers.split("/"))
    minimum, maximum = bounds or (count, count)
    others = {name: int(value) if value else True for name, _, value in (each.partition(":") for each in more)}
    return RoleSpec(name, count, minimum, maximum, elastic=bool(bounds), **others)


def place_of(name: str) -> tuple[str, Any]:
    """The role and the ordinal, if there is one."""
    match = re.fullmatch(r"(.+)_(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


class World:
    """A gang and its members, driven by a script."""

    def __init__(self) -> None:
        self.play: Play
        self.named: dict[str, FakeMember] = {}
        self.directives: dict[str, str] = {}
        self.printed = 0
        self.commands: dict[str, Callable[..., None]] = {
            "gang": self.gang,
            "join": self.join,
            "start": self.start,
            "obey": lambda name: self.named[name].obeys(),
            "settle": lambda: self.play.settle(),
            "beat": self.beat,
            "end": self.end,
            "gone": lambda name: self.play.leaves(self.named[name]),
            "crash": lambda name: self.play.take(self.play.gang.crashed(place_of(name), self.play.now)),
            "wait": self.wait,
            "sleep": lambda seconds: self.play.sleep(float(seconds.rstrip("s"))),
            "tick": lambda: None,
            "next": self.next_generation,
            "disk": self.set_disk,
            "resumed": lambda step: self.play.gang.resumed(int(step)),
        }
        self.questions: dict[str, Callable[[], str]] = {
            "missing": lambda: "; ".join(self.play.gang.missing(self.play.now)) or "nothing",
            "settled": lambda: str(self.play.settled).lower(),
            "counts": lambda: ", ".join(
                "{} {}/{}/{}".format(role, *self.play.gang.counts(role, self.play.now)) for role in self.play.gang.roles
            ),
            "epochs": lambda: ", ".join(
                f"{name} {each.directive.epoch}" for name, each in self.named.items() if each in self.play.members
            ),
        }

    # ---- commands

    def gang(self, *words: str) -> None:
        roles, rules, left = [], dict[str, Any](DEFAULTS), dict[str, Any]()
        for name, value in ((name, value) for name, _, value in (word.partition("=") for word in words)):
            if name in Rules.__dataclass_fields__:
                rules[name] = value_of(value)
            elif name in ("last", "previous", "job"):
                left[name] = value_of(value)
            elif name == "done":
                left[name] = {}
            elif name == "failed":
                left[name] = Verdict(value, 3)
            elif name == "killed":  # a rank 0 that was killed so often
                left["budget"] = Budget(fruitless=int(value), seen={"rank 0 was killed": int(value)})
            else:
                roles.append(role_of(name, value))
        self.play = Play(tuple(roles), Rules(**rules), **left)
        self.named, self.directives, self.printed = {}, {}, 0
        self.state, self.events, self.effects = "", 0, 0

    def join(self, name: str, *words: str) -> None:
        role, ordinal = place_of(name)
        changes = options([*words])
        label = str(changes.pop("as", ""))
        incarnation = str(changes.pop("incarnation", "" if role != "?" else f"rank-{self.play.joined}"))
        member = self.play.join("" if role == "?" else role, ordinal, incarnation, **changes)
        self.named[label or name_of(member.key)] = member

    def start(self) -> None:
        for role in self.play.gang.roles.values():
            for ordinal in range(role.count):
                self.join(name_of((role.name, ordinal)))
        self.play.settle()
        self.play.members[0].sends(step=1)
        self.changes()

    def beat(self, name: str, *changes: str) -> None:
        member = self.named[name]
        member.sends(**options([*changes]))
        if member not in self.play.members:
            self.play.members.append(member)

    def end(self, name: str, outcome: str, *words: str) -> None:
        error = " ".join(words).removeprefix("error=").replace("\\;", ";")
        self.named[name].ends(outcome, error=error)

    def wait(self, seconds: str, *names: str) -> None:
        self.play.wait(float(seconds.rstrip("s")), *(self.named[name] for name in names))

    def next_generation(self) -> None:
        number = self.play.gang.number
        self.play.tick()
        self.play.settle()
        for _ in range(1000):
            if self.play.gang.state in ("failed", "finished") or self.play.gang.number > number:
                return
            self.play.wait(0.5)
            self.play.settle()

    def set_disk(self, what: str) -> None:
        self.play.disk = next(each for each in get_args(Disk) if each == what)
        if what == "takes":
            self.play.take(self.play.gang.written(True, self.play.now))

    # ---- output

    def run(self, command: str) -> list[str]:
        if match := re.fullmatch(r"repeat (\d+): (.*)", command):
            for _ in range(int(match[1])):
                lines = [line for each in re.split(r"(?<!\\); ", match[2]) for line in self.run(each)]
            return lines
        name, *words = command.split()
        if name in self.questions:
            return [f"{name}: {self.questions[name]()}"]
        try:
            self.commands[name](*words)
        except RejectedError as error:
            return [f"refused ({error.reason}): {error}"]
        self.play.tick()
        return self.changes()

    def changes(self) -> list[str]:
        play, lines = self.play, list[str]()
        for effect in play.effects[self.effects :]:
            lines += [line] if (line := f"disk {play.disk}: {written(effect)}") not in lines else []
        for event in (event for event in play.events[self.events :] if event.kind != "generation"):
            details = ", ".join(f"{name}={value}" for name, value in event.details().items())
            line = f"{play.now:g}s {event.kind}{': ' if details else ''}{details}"
            lines += [line] if event.kind != "waiting" or line not in lines else []
        self.effects, self.events = len(play.effects), len(play.events)
        if play.gang.state != self.state:
            lines += [f"{play.now:g}s {self.state} -> {play.gang.state}"] if self.state else []
            self.state = play.gang.state
        changed: dict[str, list[str]] = {}
        for name, member in self.named.items():
            text = directive_of(member, name)
            if member in play.members and self.directives.get(name) != text:
                self.directives[name] = text
                changed.setdefault(text, []).append(name)
        return lines + [f"    {', '.join(names)}: {text}" for text, names in changed.items()]


def written(effect: Effect) -> str:
    if effect.kind in ("begin", "join"):
        joins = ", members now" if effect.kind == "join" else ""
        return f"generation {effect.generation}{joins}: {text_of(effect.members)}"
    return f"FAILED: {effect.verdict.reason}" if effect.verdict else "DONE"


def directive_of(member: FakeMember, name: str) -> str:
    directive = member.directive
    words: list[str] = [directive.kind]
    words += [f"generation {directive.generation}"] if directive.generation else []
    words += [f"join {directive.join}"] if directive.join else []
    words += [f"joined {', '.join(f'{name_of(each[:2])} ({each.number})' for each in directive.joined)}"] * bool(
        directive.joined
    )
    words += [f"lost {text_of(directive.lost)}"] if directive.lost else []
    words += [word for word in ("drain", "busy", "paused") if getattr(directive, word)]
    words += [f"code {directive.code}"] if directive.code else []
    words += ["for good"] if directive.final else []
    place = name_of(member.key)
    return ("" if name == place else f"{place}, ") + ", ".join(words)


def play(text: str) -> str:
    """`text` with the output that its commands have now."""
    world, blocks = World(), []
    for block in re.split(r"\n\n+", text.strip()):
        commands = block.partition("\n----")[0].splitlines()
        if all(line.startswith("#") for line in commands):
            blocks.append("\n".join(commands))
            continue
        output = [line for command in commands if not command.startswith("#") for line in world.run(command)]
        blocks.append("\n".join([*commands, "----", *output]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_rule(script: Path, request: pytest.FixtureRequest) -> None:
    text = script.read_text()
    output = play(text)
    if request.config.getoption("--rewrite", default=False):
        script.write_text(output)
    else:
        assert output == text


def test_changed_output_is_seen() -> None:
    script = SCRIPTS[0].read_text()
    assert play(script.replace("----\n", "----\nwhat no command prints\n", 1)) == script
