"""PURE: which chunk is asked of whom, and what follows if one is slow, lost or does not have it.

The chunks of a version are pulled in cells of CELL_CHUNKS. With N readers that share a version, the cell i is pulled by
the reader i mod N from a holder, one that has all of the version, and by the others from that reader. A reader that
comes later asks all holders alike; if there is only one, the other readers, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CELL_CHUNKS = 4  # of one request
IN_FLIGHT = 16  # requests of one reader
MIN_IN_FLIGHT = 2  # to each source
PATIENCE_SECONDS = 2.0  # without an answer, after which what a source was asked for is asked of another
PATIENCE_FACTOR = 4  # times the mean time to an answer are added to that
MAX_PATIENCE_SECONDS = 20.0


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
    silent: bool = False  # it has not for long


class Plan:
    """The pull of the `cells` that are missing at the reader `me`. `holders` have everything, `readers` share. Times
    are in seconds of one clock."""

    def __init__(self, me: str, cells: Iterable[int], holders: Sequence[str], readers: Sequence[str]) -> None:
        self._missing = set(cells)
        self._sources = {name: _Source(True) for name in holders if name != me}
        self._holder_of: dict[int, str] = {}  # the holder that a cell is asked of, now or later
        self._new_direct = list[int]()
        self._answers, self._seconds = 0, 0.0  # that came, and the sum of the times to them
        sharing = [name for name in readers if name not in self._sources]
        if me not in sharing and len(self._sources) > 1:
            sharing = []
        self._sources |= {name: _Source(False) for name in sharing if name != me}
        sources = self._holders()
        for cell in sorted(self._missing):
            sharer = sharing[cell % len(sharing)] if sharing else me
            if sharer != me:
                self._sources[sharer].queue.append(cell)
            elif sources:
                self._to_holder(cell, sources[cell // max(1, len(sharing)) % len(sources)])

    @property
    def missing(self) -> bool:
        """Whether there are cells that have not come."""
        return bool(self._missing)

    @property
    def hopeless(self) -> bool:
        """Whether there are, and nobody is left who may have them."""
        return bool(self._missing) and not any(source.queue or source.asked for source in self._sources.values())

    def take_direct(self) -> list[int]:
        """The cells that have become such as are asked of a holder since the last call."""
        cells, self._new_direct = self._new_direct, []
        return cells

    def next(self, now: float) -> list[Request]:
        """What is to be asked now."""
        most = max(MIN_IN_FLIGHT, IN_FLIGHT // max(1, len(self._sources)))
        requests = list[Request]()
        for name, source in self._sources.items():
            while source.queue and len(source.asked) < most:
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
            if cell in self._missing:
                self._elsewhere(name, cell)

    def look(self, now: float) -> None:
        """Asks others for the cells of sources that have not answered for long."""
        mean = self._seconds / max(1, self._answers)
        patience = min(PATIENCE_SECONDS + PATIENCE_FACTOR * mean, MAX_PATIENCE_SECONDS)
        for name, source in list(self._sources.items()):
            if source.asked and now - source.heard > patience:
                source.heard, source.silent = now, True
                late = [*source.asked, *source.queue]
                source.queue.clear()
                for cell in late:
                    if cell in self._missing:
                        self._elsewhere(name, cell)

    def _answered(self, name: str, cell: int, now: float) -> None:
        if source := self._sources.get(name):
            source.heard, source.silent = now, False
            self._answers += 1
            self._seconds += now - source.asked.pop(cell, now)

    def _elsewhere(self, name: str, cell: int) -> None:
        """Asks a holder for a cell that `name` has not sent, unless another one is asked already."""
        asked = self._holder_of.get(cell, name)
        if asked == name or asked not in self._sources:
            others = [other for other in self._holders() if other != name and cell not in self._sources[other].asked]
            if others:
                self._to_holder(cell, min(others, key=self._load))

    def _load(self, name: str) -> tuple[bool, int]:
        source = self._sources[name]
        return source.silent, len(source.queue) + len(source.asked)

    def _holders(self) -> list[str]:
        return [name for name, source in self._sources.items() if source.is_holder]

    def _to_holder(self, cell: int, name: str) -> None:
        self._holder_of[cell] = name
        self._sources[name].queue.append(cell)
        self._new_direct.append(cell)
