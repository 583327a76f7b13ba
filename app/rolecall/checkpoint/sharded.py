"""Rank 0's handle on a value that the members of a role hold: they capture, write and read their shares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rolecall.checkpoint import shardfile, shardfiles
from rolecall.checkpoint.capture import BLOCK_BYTES
from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints
from rolecall.checkpoint.shard_messages import Begin, Earlier, Order, Problem, Written
from rolecall.checkpoint.shardfile import ShardError, ShardFile
from rolecall.checkpoint.shardfiles import Shapes
from rolecall.checkpoint.shards import Shares
from rolecall.declare.task import Peer
from rolecall.errors import CallError, CallTimeoutError, PeerLostError, RemoteError, UsageError
from rolecall.record import rundir

AHEAD = 2  # calls under way


@dataclass(frozen=True)
class Collected:
    """A checkpoint's files of one sharded value, and the longest that its members' changes waited, in seconds."""

    files: list[ShardFile]
    stalled: float


class Sharded:
    """Rank 0's handle on a value of which every member of `role` holds a `Share` with this `name`. As part of the
    state that `restore` is given, it is written while training goes on, and read by any number of members.

    A subclass may add a small state of its own by `state_dict` and `load_state_dict`.
    """

    def __init__(self, context: Any, name: str, role: str) -> None:
        """`context` is this rank's `Context`. Raises UsageError at another rank than rank 0."""
        self.context, self.name, self.role = context, name, role
        self.checkpoints: Checkpoints = context.require_saver().checkpoints
        self._step: int | None = None  # of the newest order
        self._collected: tuple[int, Collected] | None = None  # the newest
        self._files: dict[str, dict[str, ShardFile]] = {}  # of checkpoints, by name: candidates for links
        self._whole = False  # the next checkpoint must not link earlier files
        self.restored = False
        context.shares.directory = self.directory  # members may request pieces of its files

    # ---- a checkpoint

    @property
    def directory(self) -> Path:
        """The folder of shards in rank 0's CHECKPOINT_DIR."""
        return self.checkpoints.directory / rundir.SHARDS

    def begin(self, step: int) -> None:
        """Makes every member capture its share, now or, if it is behind, after its `step`. Training goes on. Raises
        CheckpointError; PeerLostError if a member is gone, without which there is no next step either.
        """
        if step == self._step:
            return  # ordered before the step was made
        try:
            self._begin(step)
        except (RemoteError, CallTimeoutError) as error:
            raise CheckpointError(f"{self.checkpoints.stem(step)}: {error}") from error

    def _begin(self, step: int) -> None:
        written = self._collected is not None and step == self._collected[0]
        if written and not any(changed for _, changed in self._each(Shares.changed, self.name)):
            return  # such as at the end of a run, right after a checkpoint
        self._collected = None
        stem, self._step = self.checkpoints.stem(step), None
        settings = self.context.settings
        if settings.checkpoint_shards == "auto":  # members that see the folder write to it
            try:
                (self.directory / stem).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{stem} cannot be written to {self.directory}: {error.strerror}") from error
        kept, dropped = self.checkpoints.kept_and_dropped()
        self._files = {name: files for name, files in self._files.items() if name in kept}
        order = Order(
            step=step,
            stem=stem,
            generation=self.context.generation,
            mode=settings.checkpoint_shards,
            kept=kept,
            dropped=dropped,
            whole=self._whole,
            drain=self.context.draining,
        )
        self._whole = False
        self._each(Shares.begin, self.name, order)
        self._step = step

    def collect(self, step: int) -> Collected:
        """The files of `step`, once all are on disk. Raises CheckpointError."""
        if self._collected is not None:
            return self._collected[1]
        stem, self._step = self.checkpoints.stem(step), None
        try:
            with ThreadPoolExecutor(len(self._members)) as pool:
                collected = list(pool.map(partial(self._collect, stem), self._members))
        except CallError as error:
            raise CheckpointError(f"{stem}: {error}") from error
        written = Collected(
            [file for files, _ in collected for file in files], max(stalled for _, stalled in collected)
        )
        self._files[stem] = {file.name: file for file in written.files}
        self._collected = step, replace(written, stalled=0.0)
        return written

    def _collect(self, stem: str, peer: Peer) -> tuple[list[ShardFile], float]:
        """Waits for the files that `peer` writes, or writes the files that it sends."""
        sent, folder, files = self._items(stem, peer), self.directory / stem, list[ShardFile]()
        try:
            for item in sent:
                match item:
                    case Earlier():
                        files += self._again(folder, item)
                    case Begin(name, columns):
                        blocks = _sized(sent, sum(column.bytes for column in columns.values()))
                        files.append(shardfile.write(folder, name, columns, blocks))
                    case Written(written, stalled):
                        return [*files, *written], stalled
                    case other:
                        raise CheckpointError(f"{peer.name} answers {type(other).__name__}")
        except ShardError as error:
            raise CheckpointError(str(error)) from error
        raise AssertionError("what a peer sends ends with Written")

    def _again(self, folder: Path, earlier: Earlier) -> list[ShardFile]:
        """Links files of an earlier checkpoint into `folder`. Raises ShardError."""
        try:
            known = [self._files[earlier.stem][name] for name in earlier.names]
            if not earlier.shared:
                for name in earlier.names:
                    shardfiles.share(self.directory / earlier.stem / name, folder / name)
                shardfile.sync(folder)
        except (KeyError, ShardError) as error:
            self._whole = True
            if isinstance(error, KeyError):
                raise ShardError(f"{folder.name}: nothing is known of {error} of {earlier.stem}") from error
            raise
        return known

    def _items(self, stem: str, peer: Peer) -> Iterator[Any]:
        """The items that `peer` sends, one call ahead. Raises CheckpointError, as after PHASE_TIMEOUT."""
        call, limit = partial(self._ask, peer, Shares.next_item, self.name, stem), self.context.settings.phase_timeout
        ahead, came = call(), time.monotonic()
        while True:
            item = ahead()  # while training goes on
            if isinstance(item, Problem):
                raise CheckpointError(item.text)
            if item is None and time.monotonic() - came > limit:
                raise CheckpointError(
                    f"{stem}: nothing comes from {peer.name} for PHASE_TIMEOUT={limit:g} s; is its disk hanging?"
                )
            if not isinstance(item, Written):
                ahead = call()
            if item is not None:
                came = time.monotonic()
                yield item

    # ---- back

    def load(self, stem: str, files: list[ShardFile]) -> None:
        """Makes every member read its share from `files`. Raises CheckpointError if one of them cannot be used,
        UsageError if they do not fit this program.
        """
        local = shardfiles.held(self.directory, stem, files)
        answers = self._each(Shares.holds, self.name, stem, files, timeout=self.context.settings.phase_timeout)
        holders = {name: peer.name for peer, names in answers for name in names}
        holders |= dict.fromkeys(local, self.context.me.name)
        missing = [file.name for file in files if file.name not in holders]
        if missing:
            raise CheckpointError(f"{stem}: {missing[0]} is missing or torn")
        problems = self._each(Shares.load, self.name, stem, files, holders, timeout=self.context.settings.phase_timeout)
        for problem in (problem for _, problem in problems if problem is not None):
            raise UsageError(f"{stem}: {problem.text}") if problem.usage else CheckpointError(problem.text)
        self.restored = True
        self._files = {stem: {file.name: file for file in files}}

    def state_dict(self) -> dict[str, Any]:
        """The state beside the members' files."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state beside the members' files."""

    def load_whole(self, whole: Mapping[str, Tensor]) -> None:
        """Gives each member its rows of whole tensors. Raises UsageError if they do not fit."""
        shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        for peer, rows in self._each(Shares.prepare, self.name, shapes):
            if isinstance(rows, Problem):
                raise UsageError(rows.text)
            under_way: deque[Callable[[], Any]] = deque()
            for name, (first, step, count) in rows.items():
                share = whole[name][first::step][:count]
                size = max(1, BLOCK_BYTES // max(1, share[:1].nbytes))
                for begin in range(0, count, size):
                    part = (name, begin, share[begin : begin + size])
                    under_way.append(self._ask(peer, Shares.put, self.name, *part))
                    if len(under_way) > AHEAD:
                        under_way.popleft()()
            for answer in under_way:
                answer()
        self.restored = True

    # ---- calls

    @property
    def _members(self) -> list[Peer]:
        members: list[Peer] = self.context.peers(self.role)
        if not members:
            raise PeerLostError(f"no {self.role} is left")
        return members

    def _ask(self, peer: Peer, method: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Callable[[], Any]:
        """Calls `method` of the `Shares` of `peer`. Returns a function that waits for the answer, and raises
        PeerLostError."""
        if peer == self.context.me:
            return partial(method, self.context.shares, *args)
        answer = self.context.internal_calls.options(timeout=timeout).call(peer, method, *args)
        return lambda: self.context.wait_all([answer])[0]

    def _each(self, method: Callable[..., Any], *args: Any, timeout: float = -1.0) -> list[tuple[Peer, Any]]:
        """Calls `method` at all members at once, at this rank last. Returns their answers."""
        asked = [(peer, self._ask(peer, method, *args, timeout=timeout)) for peer in self._members]
        asked.sort(key=lambda each: each[0] != self.context.me)  # which works meanwhile, too
        return [(peer, answer()) for peer, answer in asked]


def _sized(sent: Iterator[Any], size: int) -> Iterator[Tensor]:
    """The next `size` bytes that are sent."""
    while size > 0:
        block = next(sent)
        size -= len(block)
        yield block
