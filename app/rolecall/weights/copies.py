"""The versions of each name that this process holds, complete or on their way."""

from __future__ import annotations

import enum
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolecall.declare.remote import remote
from rolecall.weights.manifest import CHUNK_BYTES, Manifest, VersionId, digest_of

KEPT_SECONDS = 10.0  # for which a version is kept after it came or was asked for, if it is not the newest
KEPT_VERSIONS = 3  # at most
KNOWN_SECONDS = 2.0  # for which a peer waits that asks for a version which this process is yet to learn of


class Absent(enum.Enum):
    """Why a holder has no answer."""

    GONE = enum.auto()  # it has nothing of that version any more
    NOT_AVAILABLE = enum.auto()  # it gets those chunks from another reader, or not in time


class Version:
    """A version, in one buffer that never changes once it is complete. `has` says of each chunk whether it is there;
    `direct`, of those that come from a member that has them, and may be waited for."""

    def __init__(self, manifest: Manifest, buffer: np.ndarray, *, complete: bool) -> None:
        self.manifest, self.buffer = manifest, buffer
        self.data = memoryview(buffer)  # type: ignore[arg-type]  # numpy's stubs know no buffer protocol
        self.has = bytearray(b"\1" if complete else b"\0") * manifest.chunks
        self.direct = bytearray(manifest.chunks)
        self.asked = time.monotonic()  # when it came, or a peer last asked for it

    @property
    def version_id(self) -> VersionId:
        """Its identity."""
        return self.manifest.version_id

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return 0 not in self.has

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk."""
        return self.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


class Copies:
    """The complete versions of `name`, the newest first, and the one that is on its way. Safe to use from several
    threads; `changed` is its lock, which is notified of what arrives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self._complete: list[Version] = []
        self._coming: Version | None = None

    @property
    def newest(self) -> Version | None:
        """The newest complete version."""
        complete = self._complete  # which is never changed, but replaced
        return complete[0] if complete else None

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> bool:
        """Waits until `ready()`, which is looked at whenever something changes. Returns False after `seconds`."""
        with self.changed:
            return self.changed.wait_for(ready, seconds)

    def notify(self) -> None:
        """Has those that wait look again."""
        with self.changed:
            self.changed.notify_all()

    # ---- versions

    def add(self, version: Version) -> None:
        """A complete version is there."""
        with self.changed:
            if self._coming is version:
                self._coming = None
            version.asked = time.monotonic()
            self._complete = sorted([version, *self._complete], key=lambda each: each.version_id, reverse=True)
            self._drop()
            self.changed.notify_all()

    def drop_old(self) -> float | None:
        """Drops versions that nobody asks for any more. Returns after how many seconds to look again, None if only the
        newest is left."""
        with self.changed:
            return self._drop()

    def _drop(self) -> float | None:
        now, old = time.monotonic(), sorted(self._complete[1:], key=lambda each: each.asked, reverse=True)
        kept = [each for each in old[: KEPT_VERSIONS - 1] if now - each.asked < KEPT_SECONDS]
        self._complete = self._complete[:1] + sorted(kept, key=lambda each: each.version_id, reverse=True)
        return min(each.asked for each in kept) + KEPT_SECONDS - now if kept else None

    def begin(self, manifest: Manifest) -> Version:
        """A version is on its way: what is here of it already is copied from the other versions."""
        if self._coming is not None and self._coming.version_id == manifest.version_id:
            self._coming.direct = bytearray(manifest.chunks)
            return self._coming
        version = Version(manifest, np.empty(manifest.nbytes, np.uint8), complete=False)
        known = dict[bytes, memoryview]()
        for source in self._here():
            known |= {
                source.manifest.digest(i): source.chunk(i) for i in range(source.manifest.chunks) if source.has[i]
            }
        for number in range(manifest.chunks):
            data, target = known.get(manifest.digest(number)), version.chunk(number)
            if data is not None and len(data) == len(target):
                target[:] = data
                version.has[number] = 1
        with self.changed:
            self._coming = version
            self.changed.notify_all()
        return version

    def put(self, version: Version, chunks: Sequence[int], contents: Sequence[memoryview]) -> int:
        """Chunks have arrived. Those with the digests of the manifest are kept. Returns the number of the others."""
        wrong, arrived = 0, list[int]()
        for number, data in zip(chunks, contents, strict=True):
            if version.has[number]:
                continue
            if digest_of(data) != version.manifest.digest(number):
                wrong += 1
                continue
            version.chunk(number)[:] = data
            arrived.append(number)
        with self.changed:
            for number in arrived:
                version.has[number] = 1
            self.changed.notify_all()
        return wrong

    # ---- what peers ask for

    def manifest(self, version_id: VersionId) -> Manifest | Absent:
        """The manifest of a version that is here, or on its way."""
        with self.changed:
            version = self._version(version_id)
            if version is None:
                return Absent.GONE
            version.asked = time.monotonic()
            return version.manifest

    def get(self, version_id: VersionId, chunks: Sequence[int], seconds: float) -> list[memoryview] | Absent:
        """The bytes of chunks. Waits for up to `seconds` for those that are on their way from a member that has them:
        two readers never wait for each other."""
        with self.changed:
            self.changed.wait_for(lambda: not self._is_new(version_id), min(seconds, KNOWN_SECONDS))
            self.changed.wait_for(lambda: self._is_settled(version_id, chunks), seconds)
            version = self._version(version_id)
            if version is None:
                return Absent.NOT_AVAILABLE if self._is_new(version_id) else Absent.GONE
            version.asked = time.monotonic()
            if not all(version.has[number] for number in chunks):
                return Absent.NOT_AVAILABLE
        return [version.chunk(number) for number in chunks]

    def _is_settled(self, version_id: VersionId, chunks: Sequence[int]) -> bool:
        """Whether waiting longer changes nothing."""
        version = self._version(version_id)
        if version is None:
            return True
        missing = [number for number in chunks if not version.has[number]]
        return not missing or not all(version.direct[number] for number in missing)

    def _is_new(self, version_id: VersionId) -> bool:
        """Whether this process is yet to learn of the version."""
        return all(version.version_id < version_id for version in self._here())

    def _version(self, version_id: VersionId) -> Version | None:
        return next((version for version in self._here() if version.version_id == version_id), None)

    def _here(self) -> list[Version]:
        """The complete versions, and that which is on its way, the last."""
        return [*self._complete, *([self._coming] if self._coming else [])]


class Holdings:
    """What this process holds of each name. Its peers call it."""

    def __init__(self) -> None:
        self._copies: dict[str, Copies] = {}
        self._lock = threading.Lock()

    def copies(self, name: str) -> Copies:
        """What is here of `name`."""
        with self._lock:
            return self._copies.setdefault(name, Copies(name))

    @remote
    def weights_manifest(self, name: str, version_id: VersionId) -> Manifest | Absent:
        """See `Copies.manifest`."""
        return self.copies(name).manifest(version_id)

    @remote
    def weights_chunks(self, name: str, version_id: VersionId, chunks: Sequence[int], seconds: float) -> Any:
        """See `Copies.get`. It waits in the thread of the call, which sends the answer: no other thread is kept from
        its work by a peer that reads slowly."""
        contents = self.copies(name).get(version_id, chunks, seconds)
        return contents if isinstance(contents, Absent) else [pickle.PickleBuffer(each) for each in contents]
