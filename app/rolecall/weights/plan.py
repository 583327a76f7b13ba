"""PURE: which chunk is asked of whom, and what follows if one is slow, lost or does not have it.

The chunks of a version are pulled in cells of CELL_CHUNKS. With readers that share a version, the cell i is pulled by
the reader i mod N from a holder, one that has all of the version, and by the others from that reader. If there are
several holders, for a reader that comes later, it is asked of the holder i mod H.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CELL_CHUNKS = 4  # of one request
IN_FLIGHT = 16  # requests of one reader
MIN_IN_FLIGHT = 2  # to each source
PATIENCE_SECONDS = 2.0  # after which what a source has not answered is asked of another
PATIENCE_FACTOR = 4  # of the longest time to an answer, which is added to that


class Request(NamedTuple):
    """To ask `source` for what is missing of `cell`."""

    source: str
    cell: int


@dataclass
class _Source:
    is_holder: bool
    queue: deque[int] = field(default_factory=deque)
    asked: dict[int, float] = field(default_factory=dict)  # cells without an answer, since when
    heard: float = 0.0  # when it last answered


class Plan:
    """The pull of the `cells` that are missing at the reader `me`. `holders` have everything, `readers` share. Times
    are in seconds of one clock."""

    def __init__(self, me: str, cells: Iterable[int], holders: Sequence[str], readers: Sequence[str]) -> None:
        self._missing = set(cells)
        self._sources = {name: _Source(True) for name in holders if name != me}
        self._longest = 0.0
        sharing = [name for name in readers if name not in self._sources]
        if len(self._sources) < 2:
            self._sources |= {name: _Source(False) for name in sharing if name != me}
        else:
            sharing = []
        for cell in sorted(self._missing):
            sharer = sharing[cell % len(sharing)] if sharing else me
            if sharer == me:
                self._to_holder(cell, cell // max(1, len(sharing)))
            else:
                self._sources[sharer].queue.append(cell)
        # shares of the same reader are asked for in another order by each of the others
        turn = sharing.index(me) + 1 if me in sharing else 0
        names = [*self._sources]
        self._order = names[turn:] + names[:turn]

    @property
    def missing(self) -> bool:
        """Whether there are cells that have not come."""
        return bool(self._missing)

    @property
    def hopeless(self) -> bool:
        """Whether there are, and nobody is left who may have them."""
        return bool(self._missing) and not any(source.queue or source.asked for source in self._sources.values())

    @property
    def direct(self) -> set[int]:
        """The missing cells that are asked of a holder."""
        holders = [source for source in self._sources.values() if source.is_holder]
        return {cell for source in holders for cell in (*source.queue, *source.asked)} & self._missing

    def next(self, now: float) -> list[Request]:
        """What is to be asked now."""
        most = max(MIN_IN_FLIGHT, IN_FLIGHT // max(1, len(self._sources)))
        requests = list[Request]()
        for name in self._order:
            source = self._sources.get(name)
            while source and source.queue and len(source.asked) < most:
                cell = source.queue.popleft()
                if cell in self._missing and cell not in source.asked:
                    if not source.asked:
                        source.heard = now  # nothing was to be heard before
                    source.asked[cell] = now
                    requests.append(Request(name, cell))
        return requests

    def came(self, name: str, cell: int, now: float) -> None:
        """A source has answered with all of a cell."""
        self._answered(name, cell, now)
        self._missing.discard(cell)

    def refused(self, name: str, cell: int, now: float) -> None:
        """A source gets a cell from another reader, or has sent something else."""
        self._answered(name, cell, now)
        if cell in self._missing:
            self._elsewhere(name, cell)

    def lost(self, name: str) -> None:
        """A source is gone, or has nothing of the version any more."""
        source = self._sources.pop(name, None)
        for cell in (*source.queue, *source.asked) if source else ():
            if cell in self._missing and not any(self._has(other, cell) for other in self._sources):
                self._elsewhere(name, cell)

    def look(self, now: float) -> None:
        """Asks others for the cells of sources that have not answered for long."""
        patience = PATIENCE_SECONDS + PATIENCE_FACTOR * self._longest
        for name, source in list(self._sources.items()):
            if source.asked and now - source.heard > patience:
                source.heard = now
                late = [*source.asked, *source.queue]
                source.queue.clear()
                for cell in late:
                    if cell in self._missing:
                        self._elsewhere(name, cell)

    def _answered(self, name: str, cell: int, now: float) -> None:
        if source := self._sources.get(name):
            source.heard = now
            self._longest = max(self._longest, now - source.asked.pop(cell, now))

    def _elsewhere(self, name: str, cell: int) -> None:
        """Asks another holder for a cell that `name` has not sent."""
        holders = [other for other, source in self._sources.items() if source.is_holder and other != name]
        if holders and not any(self._has(other, cell) for other in holders):
            self._to_holder(cell, cell, holders)

    def _has(self, name: str, cell: int) -> bool:
        """Whether a source is asked for a cell, or will be."""
        return cell in self._sources[name].asked or cell in self._sources[name].queue

    def _to_holder(self, cell: int, number: int, among: Sequence[str] = ()) -> None:
        holders = among or [name for name, source in self._sources.items() if source.is_holder]
        if holders:
            self._sources[holders[number % len(holders)]].queue.append(cell)
