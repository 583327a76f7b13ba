"""At rank 0: the newest version of each name, who has all of it, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rolecall.weights.manifest import Stamp

Member = tuple[str, int]  # its name, and the number of its part in the generation


class Offer(NamedTuple):
    """A version that is there: `holders` have all of it, the publisher first if it is one of them. `readers` are those
    that waited for it when it came: each is to pull its share from a holder, and what is left from the others."""

    stamp: Stamp
    holders: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass
class _Name:
    held: dict[Member, Stamp] = field(default_factory=dict)  # the newest complete version of each
    readers: dict[Member, None] = field(default_factory=dict)
    sharing: tuple[Member, ...] = ()  # the readers when the newest came
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Registry:
    """Used in one event loop. `is_there` says whether a member is part of the generation, as that part."""

    def __init__(self, is_there: Callable[[Member], bool]) -> None:
        self._is_there = is_there
        self._names: dict[str, _Name] = {}

    def tell(self, name: str, member: Member, stamp: Stamp | None, reads: bool) -> None:
        """A member has all of the version `stamp`, if it is not None, and waits for newer ones if it `reads`."""
        known = self._names.setdefault(name, _Name())
        if reads:
            known.readers[member] = None
        if stamp is None:
            known.held.pop(member, None)
            return
        newest = self._newest(known)
        known.held[member] = stamp
        if newest is None or stamp > newest:
            known.sharing = tuple(sorted(each for each in known.readers if each != member))
            waiting, known.waiting = known.waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def newer(self, name: str, after: Stamp | None, seconds: float) -> Offer | None:
        """The newest version, if it is newer than `after`; waits for one for up to `seconds`."""
        known = self._names.setdefault(name, _Name())
        newest = self._newest(known)
        if newest is None or (after is not None and newest <= after):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            known.waiting.append(waiter)
            try:
                async with asyncio.timeout(seconds):
                    await waiter
            except TimeoutError:
                return None
            finally:
                if waiter in known.waiting:
                    known.waiting.remove(waiter)
            newest = self._newest(known)
        return self._offer(known, newest) if newest else None

    def _newest(self, known: _Name) -> Stamp | None:
        """The newest version that a member has which is still there."""
        return max((stamp for member, stamp in known.held.items() if self._is_there(member)), default=None)

    def _offer(self, known: _Name, stamp: Stamp) -> Offer:
        held = known.held.items()
        holders = [member[0] for member, newest in held if newest == stamp and self._is_there(member)]
        holders.sort(key=lambda name: (name != stamp.publisher, name))
        readers = [member[0] for member in known.sharing if self._is_there(member)]
        return Offer(stamp, tuple(holders), tuple(readers))
