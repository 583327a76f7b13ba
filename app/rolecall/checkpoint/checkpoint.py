"""Checkpoints: atomic, checksummed snapshots, ordered by (generation, step).

A file is one line of JSON (format, job, generation, step, length of the rest, and SHA-256 of all that) and a
`torch.save` of the state and what is known about it, which is read with `weights_only=True`; then, if several ranks
hold a value of the state, a line of JSON that names their files, which are beside it in `shards/` (shardfile.py). It is
written under another name, synced and renamed, so a reader never sees a partial file, and it is what makes the shards a
checkpoint. A file that is torn all the same is skipped, and the one before it is used.

A reader trusts no file: whoever wrote it may have made the checksum, too. docs/security.md says what that rules out.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rolecall import fields
from rolecall.config import Settings
from rolecall.errors import UsageError
from rolecall.record.rundir import NAME, SHARDS, prune_shards, using, write_atomically

if TYPE_CHECKING:
    from rolecall.checkpoint.shardfile import ShardFile

FORMAT = 3
KEPT = "context.keep"  # the value whose shares are what members keep
HEAD = {"format": int, "job": str, "generation": int, "step": int, "length": int, "sha256": str}
MOST = 2**53  # of a number in the first line: every float below is exact
MOST_SHARED = 1_000_000  # values of a state that are in it more than once
MOST_SETTINGS = 10_000  # values in the settings, however they are nested,
MOST_NESTED = 20  # up to so deep
ZIP = b"PK\x03\x04"  # how the file that torch.save writes begins; its older forms are refused


class CheckpointError(Exception):
    """A checkpoint that cannot be used, or cannot be written; says which file and why, in one line."""

    def __str__(self) -> str:
        return fields.shown(super().__str__(), most=1000)


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint's contents, and its file. `about` has the pinned `settings`, `seconds` of training, work `done`,
    the state's `layout`; `shards` the files of those values that ranks hold shares of, and which `state` lacks.
    """

    path: Path
    generation: int
    step: int
    state: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, list[ShardFile]] = field(default_factory=dict)

    @property
    def pinned(self) -> dict[str, Any]:
        """The settings that the checkpoint depends on, as JSON's types."""
        return self.about.get("settings", {})  # type: ignore[no-any-return]

    def whole(self, without: Collection[str] = ()) -> Snapshot:
        """With the values that ranks hold shares of, read and put together, in `state`, but not `without`, nor what
        members keep: for one that has the memory. Raises CheckpointError if a shard is missing or torn.
        """
        from rolecall.checkpoint import shardfile  # torch: a supervisor imports this module, too

        directory = self.path.parent / SHARDS / self.path.stem
        try:
            values = {
                name: {**self._unshared(name), **shardfile.whole(directory, files)}
                for name, files in self.shards.items()
                if name not in {*without, KEPT}
            }
        except shardfile.ShardError as error:
            raise CheckpointError(f"{self.path.name}: {error}") from error
        state = {name: value for name, value in self.state.items() if name != KEPT}
        return replace(self, state={**state, **values}, shards={})

    def _unshared(self, name: str) -> dict[str, Any]:
        """What rank 0 has of a value that ranks hold shares of."""
        value = self.state.get(name, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path.name} cannot be loaded: {name} has shards, and is no dict")
        return value

    def require_layout(self, layout: int, advice: str) -> None:
        """Raises UsageError, with `advice`, if the job's state is of another `Job.layout`."""
        before = self.about.get("layout", 1)
        if before != layout:
            version = "an earlier" if before < layout else "a newer"
            raise UsageError(f"{self.path.name}: was written by {version} version of this job; {advice}")

    def require_settings(self, settings: Settings, chosen: Mapping[str, Any] | None = None) -> None:
        """Raises UsageError if a setting that the checkpoint depends on has another value now, `chosen` or set."""
        current = settings.model_dump(mode="json", include=set(self.pinned)) | dict(chosen or {})
        for name, before in self.pinned.items():
            if current.get(name, before) != before:
                what = f"{fields.shown(name.upper())}={current[name]}: the newest checkpoint in CHECKPOINT_DIR"
                raise UsageError(f"{what} was made with {fields.shown(before)}; set that, or another directory")


class Copies:
    """What becomes of copies of a run's checkpoints: nothing, as there are none. A class of rooms above has some."""

    def restore(self) -> None:
        """Has the newest checkpoint on disk, before it is looked for."""

    def repair(self, torn: str) -> bool:
        """Replaces the file `torn`. Returns whether another one is on disk now."""
        return False

    def written(self, name: str) -> None:
        """The file of this name is on disk."""

    def wait(self) -> None:
        """Waits for the copies of the newest checkpoint: this process is about to end."""

    def close(self) -> None:
        """Ends what it does."""


class Checkpoints:
    """A directory of checkpoints with one writer, and `copies` of them.

    `fence` is called before every write and returns the newest generation: a writer of an older one writes nothing.
    `complain(message)` is called for every file that cannot be used, `begin(step)` with the step that training resumes
    from.
    """

    def __init__(
        self,
        directory: Path,
        job: str,
        generation: int = 0,
        keep: int = 3,
        fence: Callable[[], int] | None = None,
        complain: Callable[[str], None] = lambda message: None,
        begin: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.directory = directory
        self.job = job
        self.generation = generation
        self.keep = keep
        self.copies = Copies()
        self._fence = fence
        self._complain = complain
        self._begin = begin
        self._bad: set[Path] = set()

    def stem(self, step: int) -> str:
        """The name of the checkpoint of `step`, without its suffix."""
        return f"checkpoint-{self.generation:06d}-{step:010d}"

    def files(self) -> list[Path]:
        """The checkpoints' files, newest first."""
        return newest_first(self.directory)

    def newest(self, accept: Callable[[Snapshot], Snapshot] = Snapshot.whole) -> Snapshot | None:
        """The newest intact checkpoint, or None if there is none at all. `accept` returns what to use in its place,
        or raises CheckpointError if its shards cannot be used.

        Raises UsageError if there are checkpoints and none can be read: starting over beside them would silently
        discard their training.
        """
        self.copies.restore()
        snapshot = self._newest(accept)
        self._begin(snapshot.step if snapshot else 0)
        return snapshot

    def _newest(self, accept: Callable[[Snapshot], Snapshot]) -> Snapshot | None:
        problems = []
        for path in self.files():
            try:
                return accept(read(path, self.job))
            except CheckpointError as error:
                if not path.exists() or self.copies.repair(path.name):
                    return self._newest(accept)  # the writer has replaced it by a newer one, or there is a copy
                problems.append(str(error))
                self._bad.add(path)
                self._complain(str(error))
        if problems:
            raise UsageError(
                f"no usable checkpoint in CHECKPOINT_DIR={self.directory} ({problems[0]}); "
                "repair or move the files away, or name another directory"
            )
        return None

    def require_current(self) -> None:
        """Raises CheckpointError if a newer generation is the writer now."""
        try:
            owner = self._fence() if self._fence else 0
        except UsageError as error:
            raise CheckpointError(f"{error}: nothing written") from error
        if owner > self.generation:
            raise CheckpointError(f"generation {self.generation} is over (now {owner}): nothing written")

    def write(
        self,
        step: int,
        state: dict[str, Any] | memoryview,
        about: dict[str, Any] | None = None,
        shards: dict[str, list[ShardFile]] | None = None,
    ) -> Path:
        """Write `state`, which may be packed already, as the checkpoint of `step`, then delete all but the newest ones.
        `shards` are the files, already written, of what ranks hold shares of.

        Raises CheckpointError if it could not be written; the files that were there before are then unchanged.
        """
        with using(self.directory):
            self.require_current()
            packed = state if isinstance(state, memoryview) else pack(state, about or {})
            listed = {name: [file.to_json() for file in files] for name, files in (shards or {}).items()}
            manifest = json.dumps(listed).encode() if listed else b""
            head = {
                "format": FORMAT,
                "job": self.job,
                "generation": self.generation,
                "step": step,
                "length": len(packed) + len(manifest),
                **({"manifest": len(manifest)} if listed else {}),
            }
            head["sha256"] = digest_of(head, (packed, manifest))
            path = self.directory / f"{self.stem(step)}.pt"
            try:
                write_atomically(path, json.dumps(head).encode() + b"\n", packed, manifest)
            except OSError as error:
                raise CheckpointError(f"{path.name} cannot be written to {self.directory}: {error.strerror}") from error
            self._bad.discard(path)
            files = self.files()
            kept = [file for file in files if file not in self._bad][: self.keep]  # an unreadable one is no spare
            unfinished = self.directory.glob(".checkpoint-*.tmp")  # of writers that were killed: there is one at a time
            dropped = list[str]()
            for old in (*files[files.index(kept[-1]) + 1 :], *unfinished):
                try:
                    old.unlink(missing_ok=True)
                    dropped.append(old.stem)
                except OSError as error:
                    self._complain(f"{old.name} cannot be deleted: {error.strerror}")
            prune_shards(self.directory, {file.stem for file in self.files()}, dropped)
        self.copies.written(path.name)
        return path


def pack(state: dict[str, Any], about: dict[str, Any]) -> memoryview:
    """A state as it is now, whatever changes afterwards, for `Checkpoints.write`."""
    import torch

    buffer = io.BytesIO()
    torch.save({"state": state, "about": about}, buffer)
    return buffer.getbuffer()


def newest_first(directory: Path) -> list[Path]:
    """The checkpoints' files in `directory`, newest first."""
    numbered = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            numbered.append((int(match.group(1)), int(match.group(2)), path))
    return [path for *_, path in sorted(numbered, reverse=True)]


def read(path: Path, job: str) -> Snapshot:
    """Read one checkpoint. Raises CheckpointError if it is torn, of another job, of another format, or holds
    anything else than a checkpoint does.
    """
    try:
        size = path.stat()
        if not stat.S_ISREG(size.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path.name} is no file")
        with using(path), path.open("rb") as file:
            head = read_head(path, file)
            require_readable(path, head, job)
            begin = file.tell()
            body = file.read() if size.st_size - begin == head["length"] else b""
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path.name} cannot be read: it does not fit into memory") from error
    if len(body) != head["length"]:
        raise CheckpointError(f"{path.name} is torn: {size.st_size - begin} bytes of {head['length']}")
    if digest_of(head, (body,)) != head["sha256"]:
        raise CheckpointError(f"{path.name} is corrupt: its checksum does not match")
    cut = len(body) - head.get("manifest", 0)
    shards = shards_of(path, body[cut:])
    content = unpack(path.name, body[:cut])
    return Snapshot(path, head["generation"], head["step"], content["state"], about=content["about"], shards=shards)


def unpack(name: str, body: bytes | memoryview) -> dict[str, Any]:
    """What `pack` was given, as `state` and `about`, from the file `name`. Raises CheckpointError if `body` holds
    anything else."""
    import torch

    if bytes(body[: len(ZIP)]) != ZIP:
        raise CheckpointError(f"{name} cannot be loaded: it is not as torch.save writes it")
    try:
        # so are empty bytes pickled; torch warns of what is no pickle of its own, which is refused below
        with torch.serialization.safe_globals([bytes]), warnings.catch_warnings(action="ignore"):
            content: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises, the file holds what may not or cannot be loaded
        lines = str(error).splitlines() or [type(error).__name__]
        problem = next((line for line in lines if "Unsupported" in line), lines[0]).partition(". Please")[0]
        raise CheckpointError(f"{name} cannot be loaded: {problem.strip()}") from error
    if problem := _problem(content, len(body)):
        raise CheckpointError(f"{name} cannot be loaded: {problem}")
    return content


def _problem(content: Any, size: int) -> str:
    """What is wrong with the contents of a checkpoint of `size` bytes; empty if nothing is."""
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in ("state", "about")):
        return "it holds no state"
    state, about = content["state"], content["about"]
    settings = about.get("settings", {})
    if not all(isinstance(name, str) for name in (*state, *about)):
        return "its values have no names"
    if not _is_bounded(state, size + MOST_SHARED):  # each value takes a byte at least
        return "its state holds itself, or the same values again and again"
    if not isinstance(settings, dict) or _count(settings, MOST_SETTINGS) > MOST_SETTINGS:
        return "its settings are damaged"
    for name in ("seconds", "done"):
        value = about.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            return f"its {name} are no number from 0"
    if type(about.get("layout", 1)) is not int:
        return "its layout is no number"
    return ""


def _is_bounded(value: Any, most: int) -> bool:
    """Whether `value` has up to `most` values, each counted as often as it is in there: a few references to lists of
    references make more than anybody can go through.
    """
    left, count = [value], 0
    while left:
        each = left.pop()
        count += 1
        if isinstance(each, dict | list | tuple | set):
            if count + len(left) + len(each) > most:
                return False
            left += each.values() if isinstance(each, dict) else each
    return True


def _count(value: Any, most: int, depth: int = MOST_NESTED) -> int:
    """Values in `value` of JSON's types, nested up to `depth`; something above `most` for more, and for any other."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and not math.isnan(value)):
        return 1
    if (
        not depth
        or type(value) not in (dict, list, tuple)
        or (type(value) is dict and not all(type(name) is str for name in value))
    ):
        return most + 1
    count = 1
    for each in value.values() if isinstance(value, dict) else value:
        count += _count(each, most - count, depth - 1)
        if count > most:
            break
    return count


def shards_of(path: Path, manifest: bytes) -> dict[str, list[ShardFile]]:
    """The files that the end of the checkpoint at `path`, its `manifest`, names. Raises CheckpointError."""
    if not manifest:
        return {}
    from rolecall.checkpoint.shardfile import ShardFile, require_alike

    try:
        listed = json.loads(manifest)
        shards = {name: [ShardFile.from_json(file) for file in files] for name, files in listed.items()}
        for files in shards.values():
            require_alike(files)
        return shards
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path.name} cannot be loaded: its list of shards is damaged") from error


def digest_of(head: dict[str, Any], body: Iterable[bytes | memoryview]) -> str:
    """The checksum that belongs into a checkpoint's first line, whose parts follow it."""
    keys = [key for key in HEAD if key != "sha256"] + ["manifest"] * ("manifest" in head)
    digest = hashlib.sha256(json.dumps([head[key] for key in keys]).encode())
    for part in body:
        digest.update(part)
    return digest.hexdigest()


def require_readable(path: Path, head: dict[str, Any], job: str) -> None:
    """Raises CheckpointError for a checkpoint of another format, or of another job."""
    if head["format"] != FORMAT:
        age = "newer" if head["format"] > FORMAT else "older"
        raise CheckpointError(f"{path.name} is of format {head['format']}, {age} than this program's {FORMAT}")
    if head["job"] != job:
        raise CheckpointError(f"{path.name} is of job {head['job']}, not of {job}")


def read_head(path: Path, file: IO[bytes]) -> dict[str, Any]:
    """A checkpoint's first line. Raises CheckpointError if it is damaged."""
    try:
        head = json.loads(file.readline(4096))
        if not isinstance(head, dict) or not all(type(head.get(key)) is kind for key, kind in HEAD.items()):
            raise ValueError
        manifest = head.get("manifest", 0)
        numbers = [manifest, *(head[key] for key, kind in HEAD.items() if kind is int)]
        if not all(type(number) is int and 0 <= number < MOST for number in numbers) or manifest > head["length"]:
            raise ValueError
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name} is torn or no checkpoint: its first line cannot be read") from None
    return head
