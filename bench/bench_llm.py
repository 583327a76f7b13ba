"""Reinforcement learning of a language model, with kills, beside a single process, and beside peers: `make bench-llm`.

The program is examples/grpo.py: a small model learns sums on the CPU. Three parts:

kills   one run undisturbed, and one in which a random worker is killed every KILL_SECONDS, both with SPARES=1: updates
        a second, accuracy after as many updates, and how often a generator loads its model because of another's death
rates   tokens a second with 1, 2 and 4 generators, synchronous and asynchronous, and of one process that samples,
        checks and learns in turn (local_grpo.py), with 1 and 2 threads
peers   beside the same on Ray's and Monarch's actors (peers/grpo_ray.py, peers/grpo_monarch.py), after `make peers`:
        tokens a second, lines of code, and what happens after a generator, a reward worker or the learner is killed

Tokens are those of completions that updates learned from. With BENCH_JSON=FILE each figure is written as it comes.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import command, llm_lines, llm_runs
from bench.display import Display
from bench.launch import PERIOD
from bench.llm_events import Member, Update, accuracy, between, reloads_of_others, tokens_per_second, updates_per_second
from bench.llm_runs import Run
from bench.peers import process

KILL_SECONDS = 20.0
SETTLE_SECONDS = 30.0  # for the last killed member's spare to load
GOODPUT = 0.95
OVER_SINGLE = 0.9
THREADS = (1, 2)  # of the single process
MIN_UPDATES = 5  # of which a rate is measured
UNBOUNDED = {"UPDATES": 10**6, "GOAL": 2.0}  # no run ends by itself
CHECKPOINT_SECONDS = 1.0  # between checkpoints, for all systems
GENERATORS, REWARDS = 2, 2
VICTIMS = {
    "generator": "a generator is killed",
    "reward": "a reward worker is killed",
    "learner": "the learner is killed",
}
COMMON: dict[str, object] = {
    "CHECKPOINT_INTERVAL": CHECKPOINT_SECONDS, "GENERATORS": GENERATORS, "REWARDS": REWARDS, **UNBOUNDED,
}  # fmt: skip
AT_ONCE = {**COMMON, "TAUGHT": 0}  # without a supervised phase: rates do not depend on what the model knows
PARTS = ("kills", "rates", "peers")
On = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    calm_seconds: float
    kills_seconds: float
    warm_seconds: float  # of a run, before its rate is measured
    rate_seconds: float
    wait_seconds: float  # for a run to go on after a kill
    generators: tuple[int, ...]


FULL = Scale(120.0, 480.0, 10.0, 40.0, 60.0, (1, 2, 4))
QUICK = Scale(15.0, 60.0, 3.0, 8.0, 40.0, (1, 2))


@dataclass(frozen=True)
class System:
    """A way to run the program. `group` is what it is installed with, if it is a peer."""

    title: str
    command: Callable[[], list[str]]
    group: str = ""


SYSTEMS = {
    "ours": System("Rolecall", llm_runs.ours),
    "ray": System("Ray", lambda: llm_runs.peer("ray"), "ray"),
    "monarch": System("Monarch", lambda: llm_runs.peer("monarch"), "monarch"),
}


@dataclass
class Kills:
    """The part `kills`: updates a second, and accuracies after as many updates."""

    updates_per_s: float = 0.0
    accuracy: float | None = None
    step: int = 0  # of the accuracy
    killed: dict[str, int] = field(default_factory=dict)  # by role
    updates_per_s_killed: float = 0.0
    accuracy_killed: float | None = None  # after `step` updates
    accuracy_end: float | None = None  # after all updates
    reloads_of_others: int = 0

    @property
    def goodput(self) -> float:
        return self.updates_per_s_killed / self.updates_per_s


@dataclass
class Peer:
    """The part `peers`, of one system. Seconds are None if it was not within the time, `ended` the victims after whose
    death the run ended."""

    lines: int = 0
    tokens_per_s: float | None = None
    next_update_s: dict[str, float | None] = field(default_factory=dict)  # by victim
    back_s: dict[str, float | None] = field(default_factory=dict)  # until the member is in use again
    ended: list[str] = field(default_factory=list)


@dataclass
class Measured:
    """What was measured."""

    kills: Kills | None = None
    rates: dict[str, dict[int, float]] = field(default_factory=dict)  # tokens a second: by mode and generators
    single: dict[int, float] = field(default_factory=dict)  # by threads
    peers: dict[str, Peer] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)

    @property
    def async_over_single(self) -> float | None:
        """The best asynchronous rate over the best of one process."""
        rates = self.rates.get("asynchronous")
        return max(rates.values()) / max(self.single.values()) if rates and self.single else None

    def bars(self) -> list[command.Bar]:
        bars: list[command.Bar] = []
        if self.kills and self.kills.updates_per_s_killed:
            goodput, reloads = self.kills.goodput, self.kills.reloads_of_others
            bars.append(("goodput", f"{goodput:.3f}", f">= {GOODPUT:g}", goodput >= GOODPUT))
            bars.append(("reloads_of_others", str(reloads), "0", reloads == 0))
        if (ratio := self.async_over_single) is not None:
            bars.append(("async_over_single", f"{ratio:.3f}", f">= {OVER_SINGLE:g}", ratio >= OVER_SINGLE))
        if self.failures:
            bars.append(("failures", "; ".join(self.failures), "0", False))
        return bars

    def to_json(self) -> dict[str, Any]:
        known: dict[str, float] = {}
        if self.kills and self.kills.updates_per_s_killed:
            known |= {"goodput": round(self.kills.goodput, 4), "reloads_of_others": self.kills.reloads_of_others}
        if (ratio := self.async_over_single) is not None:
            known["async_over_single"] = round(ratio, 4)
        return {**known, "details": {**asdict(self), "bars": command.bars_json(self), "processors": os.cpu_count()}}


# ---- the parts


class Bench:
    """The parts `only`, the last one with these systems."""

    def __init__(self, only: list[str], systems: list[str], quick: bool, console: Console) -> None:
        self._only, self._console = only, console
        self._scale = QUICK if quick else FULL
        self.measured = Measured()
        self._systems = []
        for name in systems if "peers" in only else ():
            if (group := SYSTEMS[name].group) and (problem := process.missing(group)):
                self.measured.left_out[name] = problem
                console.print(f"left out: {problem}", markup=False, highlight=False)
            else:
                self._systems.append(name)

    def run(self) -> Measured:
        steps: list[tuple[str, Callable[[On], str]]] = []
        if "kills" in self._only:
            steps += [("undisturbed", self._undisturbed), ("with kills", self._with_kills)]
        if "rates" in self._only:
            steps += [(f"one process, threads: {each}", self._single(each)) for each in THREADS]
            for count in self._scale.generators:
                steps.append((f"asynchronous, generators: {count}", self._rate("asynchronous", count)))
                steps.append((f"synchronous, generators: {count}", self._rate("synchronous", count)))
        for name in self._systems:
            steps += [(f"{SYSTEMS[name].title}, {what}", self._peer(name, role)) for role, what in VICTIMS.items()]
        measured = self.measured
        with Display(len(steps), self._console, measured.busy_percent, measured.to_json) as display:
            for what, measure in steps:
                try:
                    display.step(what, measure, lambda _: None, str)
                except (RuntimeError, TimeoutError) as error:  # the others are measured
                    self.measured.failures[what] = str(error)
                    self._console.print(f"bench-llm: {error}", markup=False, highlight=False)
        return self.measured

    # ---- kills

    def _undisturbed(self, on: On) -> str:
        with llm_runs.run(llm_runs.ours(), **COMMON, SPARES=1) as run:
            first = self._settled(run, on)
            on("no kills")
            run.sleep(self._scale.calm_seconds)
            last = time.monotonic()
            events = run.events
            rate, step = updates_per_second(events.updates, first, last), events.updates[-1].step
            found = Kills(rate, accuracy(events.scores, step), step)
        self.measured.kills = found
        return f"{rate:.2f} updates/s, accuracy {shown(found.accuracy)} after {found.step} updates"

    def _with_kills(self, on: On) -> str:
        found, dice = self.measured.kills, random.Random(1)
        if found is None:
            raise RuntimeError("there is no undisturbed run to compare with")
        members = [("generator", number) for number in range(GENERATORS)]
        members += [("reward", number) for number in range(REWARDS)] + [("learner", 0)]
        with llm_runs.run(llm_runs.ours(), **COMMON, SPARES=1) as run:
            first = self._settled(run, on)
            victims: list[tuple[str, int]] = []
            while time.monotonic() < first + self._scale.kills_seconds:
                role, number = dice.choice(members)
                on(f"kill {len(victims) + 1}: the worker of {role} {number}")
                killed = run.kill(role, number)
                victims.append((role, number))
                run.sleep(max(0.0, killed + KILL_SECONDS - time.monotonic()))
            last = time.monotonic()
            events, end = run.events, run.updates[-1].step
            found.updates_per_s_killed = updates_per_second(events.updates, first, last)
            found.accuracy_killed = accuracy(events.scores, found.step)
            found.accuracy_end = accuracy(events.scores, end)
            kills = [number for role, number in victims if role == "generator"]

            def all_loaded() -> bool:
                return len(self._loads(run, first)) >= len(kills)

            run.until(all_loaded, SETTLE_SECONDS, "the load of the last killed generator's spare")
            found.reloads_of_others = reloads_of_others(self._loads(run, first), kills)
        found.killed = {role: sum(each == role for each, _ in victims) for role in VICTIMS}
        return (
            f"{found.updates_per_s_killed:.2f} updates/s, accuracy {shown(found.accuracy_killed)} after {found.step} "
            f"updates, {shown(found.accuracy_end)} after {end}"
        )

    def _settled(self, run: Run, on: On) -> float:
        """Waits until all members and their spares have loaded, and updates come; returns when."""
        on("supervised phase, members and spares load")
        run.begun()
        loaded = 2 * GENERATORS
        run.until(lambda: len(run.events.loads("generator")) >= loaded, llm_runs.START_SECONDS, f"{loaded} generators")
        run.sleep(self._scale.warm_seconds)
        return time.monotonic()

    @staticmethod
    def _loads(run: Run, first: float) -> list[Member]:
        """The models that generators have loaded since."""
        return [load for load in run.events.loads("generator") if load.at > first]

    # ---- rates

    def _rate(self, mode: str, generators: int) -> Callable[[On], str]:
        more = {"GENERATORS": generators, **({"STALENESS": 0} if mode == "synchronous" else {})}

        def measure(on: On) -> str:
            with llm_runs.run(llm_runs.ours(), **{**AT_ONCE, **more}) as run:
                rate = self._tokens_per_second(run, on)
            self.measured.rates.setdefault(mode, {})[generators] = rate
            return f"{rate:,.0f} tokens/s"

        return measure

    def _single(self, threads: int) -> Callable[[On], str]:
        def measure(on: On) -> str:
            with llm_runs.run(llm_runs.single(), **AT_ONCE, OMP_NUM_THREADS=threads) as run:
                rate = self.measured.single[threads] = self._tokens_per_second(run, on)
            return f"{rate:,.0f} tokens/s"

        return measure

    def _tokens_per_second(self, run: Run, on: On) -> float:
        on("members load")
        run.begun()
        on("updates")
        run.sleep(self._scale.warm_seconds)
        first = time.monotonic()
        run.sleep(self._scale.rate_seconds)

        def enough() -> list[Update] | None:
            updates = between(run.updates, first, time.monotonic())
            return updates if len(updates) >= MIN_UPDATES else None

        return tokens_per_second(run.until(enough, llm_runs.START_SECONDS, f"{MIN_UPDATES} updates"))

    # ---- peers

    def _peer(self, name: str, role: str) -> Callable[[On], str]:
        """The run of a system in which a member of `role` is killed; the first one is also its rate."""

        def measure(on: On) -> str:
            peer = self.measured.peers.setdefault(name, Peer(llm_lines.of(name)))
            with llm_runs.run(SYSTEMS[name].command(), **AT_ONCE) as run:
                if peer.tokens_per_s is None:
                    peer.tokens_per_s = self._tokens_per_second(run, on)
                else:
                    on("members load")
                    run.begun()
                    run.sleep(self._scale.warm_seconds)
                on(VICTIMS[role])
                self._kill(run, role, peer)
            return (
                f"next update after {shown(peer.next_update_s[role])} s, it is back after {shown(peer.back_s[role])} s"
                + (": the run ended" if role in peer.ended else "")
            )

        return measure

    def _kill(self, run: Run, role: str, peer: Peer) -> None:
        killed = run.kill(role, 0)
        peer.next_update_s[role] = peer.back_s[role] = None
        deadline = killed + self._scale.wait_seconds
        while time.monotonic() < deadline and None in (peer.next_update_s[role], peer.back_s[role]):
            if run.ended():
                peer.ended.append(role)
                return
            time.sleep(PERIOD)
            later = [update.at for update in run.updates if update.at > killed]
            again = [m.at for m in run.events.members if m.active and (m.role, m.number) == (role, 0) and m.at > killed]
            peer.next_update_s[role] = later[0] - killed if later else None
            peer.back_s[role] = again[0] - killed if again else None


# ---- the display


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def tables(found: Measured) -> list[Table]:
    """The results for people."""
    shown_tables = []
    if (kills := found.kills) and kills.updates_per_s_killed:
        table = command.table("", "undisturbed", f"a kill every {KILL_SECONDS:g} s", title="Kills")
        table.add_row("updates a second", shown(kills.updates_per_s), shown(kills.updates_per_s_killed))
        table.add_row(f"accuracy after {kills.step} updates", shown(kills.accuracy), shown(kills.accuracy_killed))
        table.add_row("accuracy at the end", shown(kills.accuracy), shown(kills.accuracy_end))
        table.add_row("kills", "", ", ".join(f"{role} {count}" for role, count in kills.killed.items()))
        shown_tables.append(table)
    if found.rates or found.single:
        table = command.table("tokens a second", "", title="Rates")
        for threads, rate in found.single.items():
            table.add_row(f"one process, threads: {threads}", shown(rate))
        for mode, rates in found.rates.items():
            for generators, rate in rates.items():
                table.add_row(f"{mode}, generators: {generators}", shown(rate))
        shown_tables.append(table)
    if found.peers:
        table = command.table("", *(SYSTEMS[name].title for name in found.peers), title="Peers")
        peers = list(found.peers.values())
        table.add_row("lines of code", *(str(peer.lines) for peer in peers))
        table.add_row("tokens a second", *(shown(peer.tokens_per_s) for peer in peers))
        for role, what in VICTIMS.items():
            table.add_row(f"{what}: next update, s", *(after(peer, role, peer.next_update_s) for peer in peers))
            table.add_row(f"{what}: it is back, s", *(after(peer, role, peer.back_s) for peer in peers))
        shown_tables.append(table)
    return shown_tables


def after(peer: Peer, role: str, seconds: dict[str, float | None]) -> str:
    if role not in seconds:
        return ""
    if (value := seconds[role]) is not None:
        return shown(value)
    return "the run ended" if role in peer.ended else "not in time"


def main(argv: list[str] | None = None) -> int:
    """The command."""

    def options(parser: argparse.ArgumentParser) -> None:
        for name, known, what in (("only", PARTS, ""), ("systems", SYSTEMS, "in peers, of ")):
            parser.add_argument(f"--{name}", type=command.chosen_from(known), default=list(known),
                                help=what + ", ".join(known))  # fmt: skip

    def measure(arguments: argparse.Namespace, console: Console) -> Measured:
        return Bench(arguments.only, arguments.systems, arguments.quick, console).run()

    return command.run("llm", __doc__, "kills for 60 s, and rates of 8 s", measure, tables, argv, options=options)


if __name__ == "__main__":
    raise SystemExit(main())
