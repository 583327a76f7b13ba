"""At rank 0: the newest version of each name, who has all of it, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rolecall.declare.remote import remote
from rolecall.weights.manifest import VersionId

GATHER_SECONDS = 0.1  # from when a name is known until its first version is offered: readers of one time share it
Member = tuple[str, int]  # its name, and the number of its part in the generation


class Offer(NamedTuple):
    """A version that is there: `holders` have all of it, the publisher first if it is one of them. `readers` did not
    have it when it was offered first: each pulls its share from a holder, and the other shares from the other readers.
    """

    version_id: VersionId
    holders: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass
class _Name:
    held: dict[Member, VersionId] = field(default_factory=dict)  # the newest complete version of each
    readers: dict[Member, None] = field(default_factory=dict)
    offered: VersionId | None = None  # the newest version that was offered
    sharing: tuple[Member, ...] = ()  # the readers at that time who did not have it
    since: float = 0.0  # by the loop's clock
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    publications: int = 0


class Registry:
    """Members call it, in one event loop. `parts` returns, by member, the number from which on its parts in the
    generation are not over; a member that it does not know has only just joined."""

    def __init__(self, parts: Callable[[], Mapping[str, int]]) -> None:
        self._parts = parts
        self._names: dict[str, _Name] = {}

    @remote
    async def weights_number(self, name: str) -> int:
        """The number of the next publication of `name` in this generation."""
        known = self._name(name)
        known.publications += 1
        return known.publications

    @remote
    async def weights_tell(self, name: str, member: Member, version_id: VersionId | None, reads: bool) -> None:
        """A member has all of the version `version_id`, if it is not None, and waits for newer ones if it `reads`."""
        known = self._name(name)
        if reads:
            known.readers[member] = None
        if version_id is None:
            known.held.pop(member, None)
            return
        newest = self._newest(known)
        known.held[member] = version_id
        if newest is None or version_id > newest:
            waiting, known.waiting = known.waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    @remote
    async def weights_newer(self, name: str, after: VersionId | None, seconds: float) -> Offer | None:
        """The newest version, if it is newer than `after`; waits for one for up to `seconds`."""
        known, loop = self._name(name), asyncio.get_running_loop()
        newest, ends = self._newest(known), loop.time() + seconds
        while newest is None or (after is not None and newest <= after):
            waiter: asyncio.Future[None] = loop.create_future()
            known.waiting.append(waiter)
            try:
                async with asyncio.timeout_at(ends):
                    await waiter
            except TimeoutError:
                return None
            finally:
                if waiter in known.waiting:
                    known.waiting.remove(waiter)
            newest = self._newest(known)
        await asyncio.sleep(max(0.0, known.since + GATHER_SECONDS - loop.time()))
        return self._offer(known, self._newest(known) or newest)

    def _name(self, name: str) -> _Name:
        if name not in self._names:
            self._names[name] = _Name(since=asyncio.get_running_loop().time())
        return self._names[name]

    def _newest(self, known: _Name) -> VersionId | None:
        """The newest version that a member has which is still there."""
        parts = self._parts()
        return max((version_id for member, version_id in known.held.items() if _is_there(member, parts)), default=None)

    def _offer(self, known: _Name, version_id: VersionId) -> Offer:
        parts = self._parts()
        if known.offered != version_id:
            known.offered = version_id
            known.sharing = tuple(sorted(each for each in known.readers if known.held.get(each) != version_id))
        holders = [member[0] for member, held in known.held.items() if held == version_id and _is_there(member, parts)]
        holders.sort(key=lambda name: (name != version_id.publisher, name))
        readers = [member[0] for member in known.sharing if _is_there(member, parts)]
        return Offer(version_id, tuple(holders), tuple(readers))


def _is_there(member: Member, parts: Mapping[str, int]) -> bool:
    name, join = member
    return join >= parts.get(name, 0)
