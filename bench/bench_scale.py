"""What a gang costs rank 0 at 30, 300, 1,000 and 3,000 members, and how fast its orders reach them: `make bench-scale`.

A real coordinator in a process of its own; a second process speaks for all members over HTTP on loopback, with the real
`Member` and its messages. They join, beat, die, leave and finish. With BENCH_JSON=FILE each figure is written as it
comes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from bench import command
from bench.display import Display, save
from bench.scale_coordinator import allow_descriptors
from bench.scale_members import Crowd, Speaker
from rolecall.gang.protocol import Rules

SIZES = (30, 300, 1000, 3000)
QUICK_SIZES = (30, 300)
LEASE = 6.0
WINDOW = 20.0  # seconds of beats that are measured
QUICK_WINDOW = 5.0
DEADLINE = 120.0  # seconds for a part
GROWTH_BAR = 1.5  # CPU a beat at 1,000 members over that at 30, at most
CORE_BAR = 0.25  # of a core at 1,000 members, at most
FANOUT_BAR = 1.0  # seconds at 1,000 members, at most
ROWS = (  # of the table: what, the field of `Size`, its format
    ("all have joined", "join_s", "{:.2f} s"),
    ("beats a second", "beats_per_s", "{:,.0f}"),
    ("CPU a beat", "cpu_us_per_beat", "{:.0f} us"),
    ("of a core", "core_share", "{:.3f}"),
    ("memory a member", "bytes_per_member", "{:,.0f} B"),
    ("an elastic member dies: the last order", "elastic_fanout_s", "{:.2f} s"),
    ("a fixed member dies: the last order", "fixed_fanout_s", "{:.2f} s"),
    ("the next generation", "regroup_s", "{:.2f} s"),
    ("a member leaves: the last order", "leave_fanout_s", "{:.2f} s"),
    ("it has ended", "left_s", "{:.2f} s"),
    ("a member falls silent: the last order, after its lease", "silent_fanout_s", "{:.2f} s"),
    ("the end", "finish_s", "{:.2f} s"),
)
T = TypeVar("T")


@dataclass
class Size:
    """What was measured at one number of members; seconds, microseconds of CPU, bytes."""

    join_s: float | None = None
    cpu_us_per_beat: float | None = None
    core_share: float | None = None
    beats_per_s: float | None = None
    slowest_beat_s: float | None = None
    members_core_share: float | None = None
    bytes_per_member: float | None = None
    elastic_fanout_s: float | None = None
    fixed_fanout_s: float | None = None
    regroup_s: float | None = None
    leave_fanout_s: float | None = None
    left_s: float | None = None
    silent_fanout_s: float | None = None
    finish_s: float | None = None
    failures: int = 0

    @property
    def fanout_s(self) -> float | None:
        both = [value for value in (self.elastic_fanout_s, self.fixed_fanout_s) if value is not None]
        return max(both) if len(both) == 2 else None


@dataclass
class Measured:
    """By number of members."""

    window: float
    sizes: dict[int, Size] = field(default_factory=dict)
    busy_percent: list[float] = field(default_factory=list)
    part: str = ""  # under way, or where it ended

    def at(self, members: int, name: str) -> float | None:
        return getattr(self.sizes[members], name) if members in self.sizes else None

    @property
    def growth(self) -> float | None:
        few, many = self.at(30, "cpu_us_per_beat"), self.at(1000, "cpu_us_per_beat")
        return many / few if few and many else None

    def bars(self) -> list[command.Bar]:
        rows = (
            ("CPU a beat, 1,000 members", self.growth, "{:.2f} x 30 members'", GROWTH_BAR, "x"),
            ("core used, 1,000 members", self.at(1000, "core_share"), "{:.3f}", CORE_BAR, ""),
            ("death to last order, 1,000 members", self.at(1000, "fanout_s"), "{:.2f} s", FANOUT_BAR, "s"),
        )
        return [(what, text.format(value), f"<= {bar:g} {unit}".strip(), value <= bar)
                for what, value, text, bar, unit in rows if value is not None]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The contract's keys, and everything measured under `details`."""
        keys = {
            "cpu_us_per_beat_30": (30, "cpu_us_per_beat"),
            "cpu_us_per_beat_1000": (1000, "cpu_us_per_beat"),
            "core_share_1000": (1000, "core_share"),
            "fanout_s_1000": (1000, "fanout_s"),
            "fanout_s_3000": (3000, "fanout_s"),
        }
        figures = {key: value for key, place in keys.items() if (value := self.at(*place)) is not None}
        sizes = {str(members): asdict(size) for members, size in self.sizes.items()}
        details = {"lease_s": LEASE, "window_s": self.window, "sizes": sizes, "bars": command.bars_json(self),
                   "busy_percent": self.busy_percent, "processors": os.cpu_count()}  # fmt: skip
        return {**figures, "part": self.part, "details": details}


class Bench:
    """One coordinator and its members."""

    def __init__(self, measured: Measured, members: int, on: Callable[[str], None]) -> None:
        self.measured, self.members, self._on = measured, members, on
        self.size = measured.sizes[members] = Size()

    async def run(self) -> Size:
        async with AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-"))
            process = stack.enter_context(_coordinator(Path(directory), self.members))
            assert process.stdout is not None
            port = int(await self._part("start", asyncio.to_thread(process.stdout.readline)))
            self.process = psutil.Process(process.pid)
            self.crowd = Crowd(self.members, port, Rules(lease=LEASE))
            stack.push_async_callback(self.crowd.end)
            await self._measure()
            self.size.failures = self.crowd.failures
            self._keep()
        return self.size

    async def _measure(self) -> None:
        size, crowd = self.size, self.crowd
        empty = self.process.memory_info().rss
        started = time.monotonic()
        running = crowd.when_all(lambda each: _kind(each) == "run")
        await crowd.join()
        size.join_s = await self._part("join", running) - started
        self._keep()
        await self._part("beats", self._beats())
        size.bytes_per_member = (self.process.memory_info().rss - empty) / self.members
        self._keep()
        elastic, fixed = crowd.speakers[-1], crowd.speakers[1]
        size.elastic_fanout_s = await self._death("the death of an elastic member", elastic, lambda each: (
            each.directive is not None and elastic.key in each.directive.lost), elastic)  # fmt: skip
        size.fixed_fanout_s = await self._death("the death of a fixed member", fixed, lambda each: (
            _kind(each) == "stop" or _generation(each) > 1))  # fmt: skip
        died_at, again = time.monotonic() - size.fixed_fanout_s, crowd.when_all(lambda each: _generation(each) == 2)
        size.regroup_s = await self._part("the next generation", again) - died_at
        self._keep()
        leaver, silent = crowd.speakers[-3], crowd.speakers[-2]
        size.leave_fanout_s, size.left_s = await self._leave(leaver)
        self._keep()
        size.silent_fanout_s = await self._silence(silent, leaver)
        self._keep()
        first, ended_at = crowd.speakers[0], time.monotonic()
        over = crowd.when_all(lambda each: _kind(each) == "finished", but=[silent, leaver])
        first.worker_ends("finished")
        size.finish_s = await self._part("the end", over) - ended_at
        self._keep()

    async def _beats(self) -> None:
        """CPU of the coordinator, and of the process that speaks for the members, by the beat."""
        size, crowd, window = self.size, self.crowd, self.measured.window
        await asyncio.sleep(LEASE / 2)  # everyone has carried out its order, and waits
        crowd.slowest = 0.0
        us, me, started, beats = _cpu(self.process.pid), _cpu(os.getpid()), time.monotonic(), crowd.beats
        await asyncio.sleep(window)
        us, me, seconds, beats = (
            _cpu(self.process.pid) - us, _cpu(os.getpid()) - me, time.monotonic() - started, crowd.beats - beats,
        )  # fmt: skip
        if not beats:
            raise RuntimeError(f"{self.measured.part}: no beats")
        size.cpu_us_per_beat, size.core_share = 1e6 * us / beats, us / seconds
        size.beats_per_s, size.members_core_share = beats / seconds, me / seconds
        size.slowest_beat_s = crowd.slowest

    async def _death(
        self, what: str, victim: Speaker, has: Callable[[Speaker], bool], *but: Speaker
    ) -> float:  # fmt: skip
        last, died_at = self.crowd.when_all(has, but), time.monotonic()
        victim.worker_ends("killed")
        seconds = await self._part(what, last) - died_at
        self._keep()
        return seconds

    async def _leave(self, leaver: Speaker) -> tuple[float, float]:
        """From the SIGTERM of an elastic member to the last order, and to its own end."""
        last, ended, left_at = self._told_of(leaver), self.crowd.ended(leaver), time.monotonic()
        leaver.leave()
        told_at = await self._part("a member that leaves", last)
        ended_at = await self._part("the end of a member that leaves", ended)
        if leaver.member.exit_code != 0:
            raise RuntimeError(f"{self.measured.part}: exit code {leaver.member.exit_code}")
        return told_at - left_at, ended_at - left_at

    def _told_of(self, gone: Speaker, *but: Speaker) -> asyncio.Future[float]:
        return self.crowd.when_all(lambda each: each.directive is not None and gone.key in each.directive.lost,
                                   [gone, *but])  # fmt: skip

    async def _silence(self, victim: Speaker, left: Speaker) -> float:
        """From the end of the lease of a member that falls silent to the last order; `left` gets none."""
        last = self._told_of(victim, left)
        fell_silent_at = self.crowd.silence(victim)
        return await self._part("a member that falls silent", last) - fell_silent_at - LEASE

    async def _part(self, name: str, waiting: Awaitable[T]) -> T:
        self.measured.part = f"{self.members:,} members, {name}"
        self._on(name)
        try:
            return await asyncio.wait_for(waiting, DEADLINE + self.measured.window)
        except TimeoutError:
            raise TimeoutError(f"{self.measured.part}: not within {DEADLINE:g} s") from None

    def _keep(self) -> None:
        save(self.measured.to_json())


def _coordinator(directory: Path, members: int) -> Any:
    return _Coordinator([sys.executable, "-m", "bench.scale_coordinator", str(directory), str(members),
                         str(LEASE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        text=True)  # fmt: skip


class _Coordinator(subprocess.Popen[str]):
    """Ends with the measurement."""

    def __exit__(self, *_: object) -> None:
        assert self.stdin is not None
        self.stdin.close()
        try:
            self.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait(10)


def _cpu(pid: int) -> float:
    """Seconds of CPU of a process so far, from Linux's clock of its CPU time: /proc counts in hundredths."""
    return time.clock_gettime(~pid << 3 | 2)


def _kind(each: Speaker) -> str:
    return each.directive.kind if each.directive else ""


def _generation(each: Speaker) -> int:
    return each.directive.generation if each.directive else 0


def measure(sizes: tuple[int, ...], window: float, console: Console) -> Measured:
    """Everything. Raises RuntimeError or TimeoutError where a part fails; it names the part."""
    allow_descriptors()
    measured = Measured(window)
    with Display(len(sizes), console, measured.busy_percent, measured.to_json) as display:
        for members in sizes:
            display.step(f"{members:,} members", lambda on, n=members: asyncio.run(Bench(measured, n, on).run()),  # type: ignore[misc]
                         lambda size: None, _line)  # fmt: skip
    measured.part = "done"
    return measured


def _line(size: Size) -> str:
    return (f"{size.cpu_us_per_beat:.0f} us of CPU a beat, {size.core_share:.1%} of a core, last order after "
            f"{size.fanout_s:.2f} s")  # fmt: skip


def tables(measured: Measured) -> list[Table]:
    """The results for people."""
    table = command.table("members", *(f"{members:,}" for members in measured.sizes), title=f"LEASE_SECONDS={LEASE:g}")
    for what, name, text in ROWS:
        values = (getattr(size, name) for size in measured.sizes.values())
        table.add_row(what, *("" if value is None else text.format(value) for value in values))
    return [table]


def main(argv: list[str] | None = None) -> int:
    def run(arguments: argparse.Namespace, console: Console) -> Measured:
        sizes, window = (QUICK_SIZES, QUICK_WINDOW) if arguments.quick else (SIZES, WINDOW)
        return measure(sizes, window, console)

    return command.run("scale", __doc__, "30 and 300 members only", run, tables, argv)


if __name__ == "__main__":
    sys.exit(main())
