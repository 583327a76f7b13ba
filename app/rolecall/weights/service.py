"""What each worker does for its peers' weights."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping

from rolecall.declare.remote import remote
from rolecall.weights.copies import Absent, Copies, Runs
from rolecall.weights.manifest import Manifest, Stamp
from rolecall.weights.registry import Member, Offer, Registry


class WeightsService:
    """The services of one worker. At rank 0 it has the registry of the generation; for `parts`, see there."""

    def __init__(self, parts: Callable[[], Mapping[str, int]]) -> None:
        self._registry = Registry(parts)
        self._copies: dict[str, Copies] = {}
        self._lock = threading.Lock()

    def copies(self, name: str) -> Copies:
        """What this process holds of `name`."""
        with self._lock:
            return self._copies.setdefault(name, Copies(name))

    @remote
    async def weights_number(self, name: str) -> int:
        """At rank 0: see `Registry.number`."""
        return self._registry.number(name)

    @remote
    async def weights_tell(self, name: str, member: Member, stamp: Stamp | None, reads: bool) -> None:
        """At rank 0: see `Registry.tell`."""
        self._registry.tell(name, member, stamp, reads)

    @remote
    async def weights_newer(self, name: str, after: Stamp | None, seconds: float) -> Offer | None:
        """At rank 0: see `Registry.newer`."""
        return await self._registry.newer(name, after, seconds)

    @remote
    def weights_manifest(self, name: str, stamp: Stamp) -> Manifest | Absent:
        """See `Copies.manifest`."""
        return self.copies(name).manifest(stamp)

    @remote
    def weights_chunks(self, name: str, stamp: Stamp, runs: Runs, seconds: float) -> list[pickle.PickleBuffer] | Absent:
        """See `Copies.get`. It waits in the thread of the call, which sends the answer: no other thread is kept from
        its work by a peer that reads slowly."""
        parts = self.copies(name).get(stamp, runs, seconds)
        return parts if isinstance(parts, Absent) else [pickle.PickleBuffer(part) for part in parts]
