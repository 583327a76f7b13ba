"""`python -m rolecall watch TARGET...`: the live display of ranks that run anywhere, and when it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from rich.console import Console
from rich.live import Live

from rolecall.config import UsageError
from rolecall.gang.protocol import FAILED
from rolecall.watch.display import Target, Watch, follow
from rolecall.watch.targets import Folder, Source, end_of, parse, ranks_of

RESOLVE = 10.0  # seconds between two look-ups of names
LINGER = 5.0  # seconds that the end is shown where rank 0 stays up after it
LINE = 10.0  # seconds between two lines where nothing changes
ONCE = 2.0  # seconds that --once waits for those who do not answer beside one who does
INTERRUPTED = 130


class Watcher:
    """Watches what the TARGETs stand for until the job is over. `timeout` is how long nobody may answer, in seconds."""

    def __init__(self, sources: list[Source], timeout: float, once: bool) -> None:
        self.sources, self.timeout, self.once = sources, timeout, once
        self.watch = Watch([])
        self.code = 0
        self.said = ""  # how it ended
        self._heard = time.monotonic()
        self._reached = False
        self._polls = 0
        self._twins = set[str]()  # URLs of ranks that are shown by another
        self._over: tuple[str, float] | None = None  # the gang's state, and when that was seen

    async def keep_looking(self) -> None:
        """Look the names up, again and again."""
        while True:
            await self.look()
            await asyncio.sleep(RESOLVE)

    async def look(self) -> None:
        """Look the names up. A rank that has gone stays on the display while it answers."""
        found = [one for addresses in await asyncio.gather(*(one.addresses() for one in self.sources))
                 for one in addresses]  # fmt: skip
        known = {target.url: target for target in self.watch.targets}
        wanted = {
            one.url: known.get(one.url) or Target(one.name, one.url) for one in found if one.url not in self._twins
        }
        stay = {url: target for url, target in known.items() if target.up or not wanted}
        self.watch.targets = list({**stay, **wanted}.values())

    def over(self) -> bool:
        """Whether to end, after a poll. Raises UsageError where nobody answers, or two are the same rank."""
        now, watch = time.monotonic(), self.watch
        self._polls += 1
        up = [target for target in watch.targets if target.up]
        if up:
            if not self._reached:
                self._refuse_twins(up)
            self._heard, self._reached = now, True
        if self.once:
            if up and len(up) == len(watch.targets):
                return self._polls > 1  # a rate takes two
            return self._late(now, ONCE)
        state = watch.first.state("gang_state") if watch.first and watch.first.up else ""
        if state in ("finished", "failed"):
            self._over = self._over or (state, now)
        elif state:
            self._over = None  # it was started anew
        if self._over and (not state or now - self._over[1] > LINGER):
            return self._end(self._over[0])
        if not up and self._reached and all(isinstance(one, Folder) for one in self.sources):
            ends = [end_of(one.path) for one in self.sources if isinstance(one, Folder) and not ranks_of(one.path)]
            if len(ends) == len(self.sources):
                return self._end(ends[0])
        return self._late(now, self.timeout)

    def _late(self, now: float, limit: float) -> bool:
        """Raises UsageError where nobody has answered for too long; for `once` says that those who do are enough."""
        if self._reached and self.once:
            return now - self.watch.started > limit
        if now - self._heard <= self.timeout:
            return False
        problems = "; ".join(f"{target.rank}: {target.problem or 'no answer'}" for target in self.watch.targets[:5])
        more = " any more" if self._reached else ""
        raise UsageError(
            f"no rank has answered{more} for {self.timeout:g} s ({problems or 'no local run there'}); "
            "is the job running, and are these its METRICS_PORTs?"
        )

    def _refuse_twins(self, up: list[Target]) -> None:
        """The same rank by two names is shown once; two ranks of one name are of two jobs."""
        seen: dict[str, Target] = {}
        for target in up:
            other = seen.setdefault(target.rank, target)
            if other is target or not target.info["ordinal"]:
                continue
            if other.value("up_since_seconds") != target.value("up_since_seconds"):
                raise UsageError(f"{other.name} and {target.name} are both {target.rank}: watch one job")
            self._twins.add(target.url)
            self.watch.targets.remove(target)

    def _end(self, state: str) -> bool:
        self.code = FAILED if state == "failed" else 0
        self.said = f"{self.watch.job} {state}: {self.watch.spec.score} {self.watch.score()}"
        return True

    def line(self) -> str:
        """The display in a line."""
        ranks = ", ".join(f"{target.rank} {target.shown}" for target in self.watch.targets)
        if not self.watch.job:
            return ranks
        score = f"{self.watch.spec.score} {self.watch.score()}"
        return f"{self.watch.job}  {self.watch.summary()}  {score}  ({ranks})"


class Lines:
    """Lines instead of the display: whenever a state changes, and now and then."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._before: list[str] = []
        self._at = 0.0

    def show(self) -> None:
        watch, now = self.watcher.watch, time.monotonic()
        first = watch.first
        states = [first.state("gang_state") if first else "", *(f"{one.rank} {one.shown}" for one in watch.targets)]
        if states != self._before or now - self._at >= LINE:
            self._before, self._at = states, now
            print(self.watcher.line(), flush=True)


async def _watch(watcher: Watcher, plain: bool) -> int:
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, me.cancel)  # which leaves the terminal as it was
    looking = None
    try:
        await watcher.look()
        looking = asyncio.create_task(watcher.keep_looking())
        await _show(watcher, plain)
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        if looking:
            looking.cancel()
    if watcher.said:
        print(f"rolecall: {watcher.said}", flush=True)
    return watcher.code


async def _show(watcher: Watcher, plain: bool) -> None:
    watch, console = watcher.watch, Console()
    if watcher.once:
        await follow(watch, lambda: None, watcher.over)
        Console(width=None if sys.stdout.isatty() else 100).print(watch.render())
    elif plain:
        await follow(watch, Lines(watcher).show, watcher.over)
    else:
        with Live(console=console, auto_refresh=False) as live:
            await follow(watch, lambda: live.update(watch.render(console.width), refresh=True), watcher.over)


def run(texts: list[str], plain: bool, once: bool, timeout: float) -> int:
    """Watch the ranks that `texts` name. Returns the exit code: 0 finished, 3 the job failed, 130 a signal.

    Raises UsageError where a text is no target, nobody answers within `timeout` seconds, or they are of two jobs.
    """
    sources = [parse(text) for text in texts]
    for source in sources:
        if isinstance(source, Folder) and not ranks_of(source.path):
            raise UsageError(f"TARGET {source.path}: no local run is under way there")
    return asyncio.run(_watch(Watcher(sources, timeout, once), plain or not sys.stdout.isatty()))
