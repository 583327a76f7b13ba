"""`rolecall watch TARGET...`: the live display of ranks, and its end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from rich.console import Console
from rich.live import Live

from rolecall.errors import FAILED, UsageError
from rolecall.observe.display import Display, Target, poll_forever
from rolecall.observe.targets import Folder, Source, final_state, parse, ranks_of

RESOLVE_SECONDS = 10.0  # seconds between two resolutions of the TARGETs
LINGER_SECONDS = 5.0  # seconds that the end is displayed if rank 0 stays up after it
LINE_SECONDS = 10.0  # seconds between two lines if nothing changes
ONCE_SECONDS = 2.0  # seconds that --once waits for the other ranks, after the first answer
INTERRUPTED = 130


class Viewer:
    """Displays the ranks of `sources` until the job is over. `timeout` is how long, in seconds, no rank may answer."""

    def __init__(self, sources: list[Source], timeout: float, once: bool) -> None:
        self.sources, self.timeout, self.once = sources, timeout, once
        self.display = Display([])
        self.code = 0  # exit code
        self.result = ""  # how the job ended
        self._answered = time.monotonic()
        self._reached = False
        self._polls = 0
        self._duplicates = set[str]()  # URLs of ranks that another URL displays
        self._over: tuple[str, float] | None = None  # the gang's final state, and when it was first seen

    async def resolve_forever(self) -> None:
        """Resolves the sources every few seconds."""
        while True:
            await self.resolve()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def resolve(self) -> None:
        """Resolves the sources. A rank that is no longer among them stays on display while it answers."""
        lists = await asyncio.gather(*(source.addresses() for source in self.sources))
        self._duplicates &= {address.url for addresses in lists for address in addresses}
        known = {target.url: target for target in self.display.targets}
        current = {
            address.url: known.get(address.url) or Target(address.name, address.url)
            for addresses in lists
            for address in addresses
            if address.url not in self._duplicates
        }
        stay = {url: target for url, target in known.items() if target.up or not current}
        self.display.targets = list({**stay, **current}.values())

    def over(self) -> bool:
        """Whether to end, after a poll. Raises UsageError if no rank answers, or two are the same rank."""
        now, display = time.monotonic(), self.display
        self._polls += 1
        up = [target for target in display.targets if target.up]
        if up:
            if not self._reached:
                self._merge_duplicates(up)
            self._answered, self._reached = now, True
        if self.once:
            if up and len(up) == len(display.targets):
                return self._polls > 1  # a rate takes two
            return self._late(now, ONCE_SECONDS)
        state = display.rank0.label("gang_state") if display.rank0 and display.rank0.up else ""
        if state in ("finished", "failed"):
            self._over = self._over or (state, now)
        elif state:
            self._over = None  # a new run has started
        if self._over and (not state or now - self._over[1] > LINGER_SECONDS):
            return self._end(self._over[0])
        if not up and self._reached:
            ended = [source.path for source in self.sources if isinstance(source, Folder) and not ranks_of(source.path)]
            if len(ended) == len(self.sources):
                return self._end(final_state(ended[0]))
        return self._late(now, self.timeout)

    def _late(self, now: float, limit: float) -> bool:
        """With `once`, whether the ranks that answer are enough. Raises UsageError if none has for too long."""
        if self._reached and self.once:
            return now - self.display.started > limit
        if now - self._answered <= self.timeout:
            return False
        problems = "; ".join(f"{target.rank}: {target.problem or 'no answer'}" for target in self.display.targets[:5])
        more = " any more" if self._reached else ""
        raise UsageError(
            f"no rank has answered{more} for {self.timeout:g} s ({problems or 'no local run there'}); "
            "is the job running, and are these its METRICS_PORTs?"
        )

    def _merge_duplicates(self, up: list[Target]) -> None:
        """Displays a rank with two URLs once. Raises UsageError for two ranks with one name: they are of two jobs."""
        first: dict[str, Target] = {}
        for target in up:
            other = first.setdefault(target.rank, target)
            if other is target or not target.info["ordinal"]:
                continue
            if other.value("up_since_seconds") != target.value("up_since_seconds"):
                raise UsageError(f"{other.name} and {target.name} are both {target.rank}: watch one job")
            self._duplicates.add(target.url)
            self.display.targets.remove(target)

    def _end(self, state: str) -> bool:
        self.code = FAILED if state == "failed" else 0
        self.result = f"{self.display.job} {state}: {self.display.called('score')} {self.display.score()}"
        return True

    def line(self) -> str:
        """The display as one line."""
        ranks = ", ".join(f"{target.rank} {target.state}" for target in self.display.targets)
        if not self.display.job:
            return ranks
        score = f"{self.display.called('score')} {self.display.score()}"
        return f"{self.display.job}  {self.display.summary()}  {score}  ({ranks})"


class LinePrinter:
    """Prints lines instead of the display: when a state changes, and every `LINE_SECONDS` seconds."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self._states: list[str] = []  # of the last line
        self._printed = 0.0

    def show(self) -> None:
        """Prints a line, if one is due."""
        display, now = self.viewer.display, time.monotonic()
        first = display.rank0
        states = [first.label("gang_state") if first else "", *(f"{one.rank} {one.state}" for one in display.targets)]
        if states != self._states or now - self._printed >= LINE_SECONDS:
            self._states, self._printed = states, now
            print(self.viewer.line(), flush=True)


async def _view(viewer: Viewer, plain: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)  # which restores the terminal
    resolving = None
    try:
        await viewer.resolve()
        resolving = asyncio.create_task(viewer.resolve_forever())
        await _show(viewer, plain)
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        if resolving:
            resolving.cancel()
    if viewer.result:
        print(f"rolecall: {viewer.result}", flush=True)
    return viewer.code


async def _show(viewer: Viewer, plain: bool) -> None:
    display, console = viewer.display, Console()
    if viewer.once:
        await poll_forever(display, lambda: None, viewer.over)
        Console(width=None if sys.stdout.isatty() else 100).print(display.render())
    elif plain:
        await poll_forever(display, LinePrinter(viewer).show, viewer.over)
    else:
        with Live(console=console, auto_refresh=False) as live:
            await poll_forever(display, lambda: live.update(display.render(console.width), refresh=True), viewer.over)


def run(texts: list[str], plain: bool, once: bool, timeout: float) -> int:
    """Displays the ranks that `texts` name. Returns the exit code: 0 finished, 3 the job failed, 130 after a signal.

    Raises UsageError if a text is no TARGET, no rank answers for `timeout` seconds, or they are of two jobs.
    """
    sources = [parse(text) for text in texts]
    for source in sources:
        if isinstance(source, Folder) and not ranks_of(source.path):
            raise UsageError(f"TARGET {source.path}: no local run is under way there")
    return asyncio.run(_view(Viewer(sources, timeout, once), plain or not sys.stdout.isatty()))
