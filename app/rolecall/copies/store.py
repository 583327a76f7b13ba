"""A folder of checkpoints that come and go chunk by chunk, as peers call it.

It has the form of CHECKPOINT_DIR: a checkpoint's file makes its shards a checkpoint, and comes last. What arrives is
written under other names, synced and renamed. Chunks that a checkpoint here has already do not travel. Whatever comes
is data: names, sizes and digests (SHA-256) are checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from rolecall import telemetry
from rolecall.checkpoint import shardfile
from rolecall.checkpoint.checkpoint import CheckpointError, digest_of, read_head, require_readable, shards_of
from rolecall.copies.choice import Claim, Known, Stem
from rolecall.declare.remote import remote
from rolecall.record import rundir
from rolecall.weights import manifest
from rolecall.weights.manifest import CHUNK_BYTES, DIGEST_BYTES
from rolecall.wire.connecting import machine_id

BLOCK_BYTES = 64 * CHUNK_BYTES  # of one read
MAX_CACHED_FILES = 1000  # whose digests are remembered: a checkpoint may share most of its files with the one before
MOST = 2**53  # bytes of a file
LOCK, LOCK_SECONDS = ".lock", 10.0  # of what is known


class CopyError(Exception):
    """A copy that cannot be taken, or cannot be used; says which and why, in one line."""


class File(NamedTuple):
    """A file of a checkpoint: that of shards with this `name`, or without one the checkpoint's own, whose first line of
    `head` bytes is a chunk: all that follows stays in place however long it is."""

    name: str
    size: int
    head: int
    digests: bytes

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return bool(self.head) - (self.head - self.size) // CHUNK_BYTES

    def span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins, and its length."""
        if self.head and not chunk:
            return 0, self.head
        begin = self.head + (chunk - bool(self.head)) * CHUNK_BYTES
        return begin, min(CHUNK_BYTES, self.size - begin)

    def digest(self, chunk: int) -> bytes:
        """The digest of a chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def require_sound(self) -> None:
        """Raises CopyError for what no file can be."""
        numbers = all(type(number) is int for number in (self.size, self.head))
        if not numbers or not 0 <= self.head <= self.size < MOST or type(self.name) is not str:
            raise CopyError("no list of a checkpoint's files")
        if len(self.digests) != self.chunks * DIGEST_BYTES or bool(self.name) == bool(self.head):
            raise CopyError(f"{self.name or 'the checkpoint'}: the digests are not those of {self.size} bytes")
        if self.name and (Path(self.name).name != self.name or self.name == ".." or "\0" in self.name):
            raise CopyError(f"{self.name!r} is no name of a file")


class Listing(NamedTuple):
    """A checkpoint's files; its own is the last one."""

    checkpoint: Stem
    files: tuple[File, ...]

    def require_sound(self) -> None:
        """Raises CopyError for what no checkpoint consists of."""
        stem_of(self.checkpoint)
        for file in self.files:
            file.require_sound()
        names = [file.name for file in self.files]
        if not names or names[-1] or len({*names}) < len(names):
            raise CopyError("no list of a checkpoint's files")


@dataclass
class _Coming:
    """A checkpoint on its way; of each file, where it is written, None if it is complete, and the chunks it lacks."""

    listing: Listing
    paths: list[Path | None]
    missing: list[set[int]]


def stem_of(checkpoint: Stem) -> str:
    """The name of a checkpoint, without its suffix. Raises CopyError for what is none."""
    generation, step = checkpoint
    stem = f"checkpoint-{generation:06d}-{step:010d}"
    if type(generation) is not int or type(step) is not int or not rundir.NAME.fullmatch(f"{stem}.pt"):
        raise CopyError(f"{checkpoint!r} is no checkpoint")
    return stem


class Store:
    """The checkpoints in `directory`, for the member `me`: copies, or rank 0's, of its `job`. Methods raise CopyError,
    and OSError and ShardError for the disk's."""

    def __init__(self, directory: Path, me: str, job: str | None = None) -> None:
        self.directory, self.me, self._job = directory, me, job
        self._digests: dict[tuple[int, ...], bytes] = {}  # by file, as it was
        self._coming: _Coming | None = None
        self._lock = threading.RLock()

    def held(self) -> tuple[Stem, ...]:
        """The checkpoints that are here, the newest first."""
        with contextlib.suppress(FileNotFoundError):
            return tuple(sorted(rundir.saved(self.directory), reverse=True))
        return ()

    def path(self, checkpoint: Stem) -> Path:
        """The file of a checkpoint."""
        return self.directory / f"{stem_of(checkpoint)}.pt"

    def _shards(self, checkpoint: Stem) -> Path:
        return self.directory / rundir.SHARDS / stem_of(checkpoint)

    def _place(self, checkpoint: Stem, name: str) -> Path:
        return self._shards(checkpoint) / name if name else self.path(checkpoint)

    # ---- what is here

    @remote
    def copies_claim(self, generation: int) -> Claim:
        """What is held here, and what is known of others. Remembers the `generation`, which has begun."""
        try:
            known = self._remember(lambda before: before.begun(generation))
        except OSError as error:  # a full disk may hold the newest copy
            telemetry.log().warning("copies", directory=str(self.directory), problem=error.strerror)
            known = self._known()
        return Claim(machine_id(), self.held(), known.checkpoint, known.holders)

    @remote
    def copies_note(self, known: Known) -> None:
        """Remembers a newer checkpoint that members hold, or who holds it."""
        self._remember(lambda before: before.noted(known))

    def _known(self) -> Known:
        path = self.directory / rundir.NEWEST
        try:
            return msgspec.json.decode(path.read_bytes(), type=Known)
        except FileNotFoundError:
            return Known()
        except msgspec.DecodeError as error:
            raise CopyError(f"{path}: is damaged; delete it") from error

    def _remember(self, change: Callable[[Known], Known]) -> Known:
        """Changes what is known here, once where members share a disk. Returns it."""
        lock = rundir.lock(self.directory, LOCK, LOCK_SECONDS)
        try:
            before = self._known()
            if (known := change(before)) != before:
                rundir.write_atomically(self.directory / rundir.NEWEST, json.dumps(known).encode())
            return known
        finally:
            lock.release()

    @remote
    def copies_forget(self) -> None:
        """Deletes all that is held here: another run begins, with later generations."""
        with self._lock:
            self._remember(lambda before: Known(before.generation))
            self._prune(())

    @remote
    def copies_listing(self, checkpoint: Stem) -> Listing:
        """The files of a checkpoint that is here, with digests of what is on disk."""
        path = self.path(checkpoint)
        try:
            with rundir.using(path), path.open("rb") as file:
                head, names = read_head(path, file), dict[str, None]()
                require_readable(path, head, self._job or head["job"])
                begin, cut = file.tell(), head.get("manifest", 0)
                file.seek(begin + head["length"] - cut)
                for shards in shards_of(path, file.read(cut)).values():
                    names |= dict.fromkeys(shard.name for shard in shards)
        except CheckpointError as error:
            raise CopyError(str(error)) from error
        files = [self._list(checkpoint, name, 0) for name in names]
        return Listing(checkpoint, (*files, self._list(checkpoint, "", begin)))

    def _list(self, checkpoint: Stem, name: str, head: int) -> File:
        path = self._place(checkpoint, name)
        with rundir.using(path), path.open("rb") as file:
            stat = os.fstat(file.fileno())
            digests = self._digests.pop(_identity(stat), None)
            if digests is None:
                first = [manifest.digest_of(memoryview(file.read(head)))] if head else []
                digests = b"".join([*first, *(manifest.digests_of(memoryview(block)) for block in _blocks(file))])
        self._cache(stat, digests)
        return File(name, stat.st_size, head, digests)

    def _cache(self, stat: os.stat_result, digests: bytes) -> None:
        with self._lock:
            self._digests[_identity(stat)] = digests
            while len(self._digests) > MAX_CACHED_FILES:
                del self._digests[next(iter(self._digests))]

    @remote
    def copies_read(self, checkpoint: Stem, file: File, chunks: Sequence[int]) -> Any:
        """The bytes of chunks of a file."""
        file.require_sound()
        with self._place(checkpoint, file.name).open("rb") as opened:
            return [pickle.PickleBuffer(_read(opened, *file.span(chunk))) for chunk in chunks]

    # ---- what comes

    @remote
    def copies_begin(self, listing: Listing) -> list[list[int]]:
        """Makes room for a checkpoint, instead of another one on its way. Returns the chunks of each file that are not
        here yet. Raises CopyError, also if this is a member's folder and knows of a newer generation."""
        listing.require_sound()
        with self._lock:
            newest = self._known().newest(self.held())
            if self._job is None and listing.checkpoint[0] < newest:
                raise CopyError(f"{stem_of(listing.checkpoint)}: generation {newest} has begun; nothing written")
            self._drop()
            before, folder = self._before(), self._shards(listing.checkpoint)
            (folder if len(listing.files) > 1 else self.directory).mkdir(parents=True, exist_ok=True)
            self._coming = _Coming(listing, [], [])
            with contextlib.ExitStack() as stack:
                chunks = dict[bytes, tuple[IO[bytes], int, int]]()
                files, earlier = (before.files, before.checkpoint) if before else ((), (0, 0))
                for each in files:
                    opened = stack.enter_context(self._place(earlier, each.name).open("rb"))
                    chunks |= {each.digest(chunk): (opened, *each.span(chunk)) for chunk in range(each.chunks)}
                for each in listing.files:
                    place = self._place(listing.checkpoint, each.name)
                    if each.name and each in files:
                        shardfile.share(self._place(earlier, each.name), place)
                        self._add(None, set())
                    else:
                        path = place.with_name(f".{place.name}.{self.me}.tmp")
                        self._add(path, self._fill(each, path, chunks))
            return [sorted(missing) for missing in self._coming.missing]

    def _add(self, path: Path | None, missing: set[int]) -> None:
        assert self._coming is not None
        self._coming.paths.append(path)
        self._coming.missing.append(missing)

    def _before(self) -> Listing | None:
        """The newest checkpoint that is here, and can be read."""
        for stem in self.held():
            with contextlib.suppress(CopyError, OSError):
                return self.copies_listing(stem)
        return None

    def _fill(self, file: File, path: Path, chunks: dict[bytes, tuple[IO[bytes], int, int]]) -> set[int]:
        """Makes the file `path`, with the `chunks` that it shares with others. Returns those that are missing."""
        missing = set[int]()
        path.unlink(missing_ok=True)
        with rundir.using(path), path.open("xb") as target:
            target.truncate(file.size)
            for chunk in range(file.chunks):
                digest, (begin, length) = file.digest(chunk), file.span(chunk)
                data = _read(*chunks[digest]) if digest in chunks else b""
                if len(data) == length and manifest.digest_of(memoryview(data)) == digest:
                    os.pwrite(target.fileno(), data, begin)
                else:
                    missing.add(chunk)
        return missing

    @remote
    def copies_put(self, checkpoint: Stem, number: int, chunks: Sequence[int], contents: Sequence[Any]) -> None:
        """Takes chunks of the file `number` of the checkpoint that is on its way."""
        coming = self._expect(checkpoint)
        file, path = coming.listing.files[number], coming.paths[number]
        if path is None:
            return
        with rundir.using(path), path.open("r+b") as target:
            for chunk, content in zip(chunks, [memoryview(each) for each in contents], strict=True):
                begin, length = file.span(chunk)
                if not 0 <= chunk < file.chunks or content.nbytes != length:
                    raise CopyError(f"{path.name}: is not in chunks of this size")
                if manifest.digest_of(content) != file.digest(chunk):
                    raise CopyError(f"{path.name}: arrived with another digest")
                os.pwrite(target.fileno(), content, begin)
        with self._lock:
            coming.missing[number].difference_update(chunks)

    @remote
    def copies_commit(self, checkpoint: Stem, kept: Sequence[Stem] | None = None) -> None:
        """The checkpoint on its way is complete. All but that and the `kept` ones are deleted, if those are given."""
        with self._lock:
            coming, shards = self._expect(checkpoint), list[str]()
            if any(coming.missing):
                raise CopyError(f"{stem_of(checkpoint)}: has not come as a whole")
            *others, path = coming.paths
            for file, each in zip(coming.listing.files, others, strict=False):
                if each is not None:
                    each.replace(self._place(checkpoint, file.name))
                shards.append(file.name)
            if shards:
                shardfile.sync(self._shards(checkpoint), shards)
            assert path is not None
            self._require_whole(checkpoint, path)
            path.replace(self.path(checkpoint))
            rundir.sync_directory(self.directory)
            self._coming = None
            for file in coming.listing.files:
                self._cache(self._place(checkpoint, file.name).stat(), file.digests)
            if kept is not None:
                self._prune([checkpoint, *kept])

    def _expect(self, checkpoint: Stem) -> _Coming:
        coming = self._coming
        if coming is None or coming.listing.checkpoint != checkpoint:
            raise CopyError(f"{stem_of(checkpoint)}: another checkpoint is on its way")
        return coming

    def _require_whole(self, checkpoint: Stem, path: Path) -> None:
        """Has the checkpoint's file at `path` on disk. Raises CopyError if it is not what its first line says."""
        try:
            with rundir.using(path), path.open("rb") as file:
                head = read_head(path, file)
                require_readable(path, head, self._job or head["job"])
                whole = head["length"] == os.fstat(file.fileno()).st_size - file.tell()
                if (head["generation"], head["step"]) != checkpoint or not whole:
                    raise CopyError(f"{stem_of(checkpoint)}: its first line is of another checkpoint")
                if digest_of(head, _blocks(file)) != head["sha256"]:
                    raise CopyError(f"{stem_of(checkpoint)}: is corrupt, its checksum does not match")
                os.fsync(file.fileno())
        except CheckpointError as error:
            raise CopyError(str(error)) from error

    def _drop(self) -> None:
        """Gives up what is on its way, and what a process that was killed has left."""
        self._coming = None
        for path in (*self.directory.glob(f".*.{self.me}.tmp"), *self.directory.glob(f"*/*/.*.{self.me}.tmp")):
            path.unlink(missing_ok=True)

    def _prune(self, kept: Sequence[Stem]) -> None:
        """Deletes all checkpoints but the `kept` ones."""
        dropped = [stem for stem in self.held() if stem not in kept]
        for stem in dropped:
            self.path(stem).unlink(missing_ok=True)
        rundir.prune_shards(self.directory, {*map(stem_of, kept)}, {*map(stem_of, dropped)})


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(file: IO[bytes], begin: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, begin)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, BLOCK_BYTES), b"")
