"""A sharded value at rank 0: the members of a role hold it, and its checkpoints are written where they are."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolecall.config import UsageError
from rolecall.job import shardfile, shards
from rolecall.job.capture import BLOCK
from rolecall.job.checkpoint import CheckpointError, Checkpoints
from rolecall.job.peers import Peers
from rolecall.job.shardfile import ShardError, ShardFile
from rolecall.job.shards import Order, Problem, Shapes, Written
from rolecall.job.task import Peer, PeerLostError
from rolecall.run import rundir

LOAD_SECONDS = 3600.0  # deadline of a rank that reads its share; the gang notices a rank that falls silent
AHEAD = 2  # calls under way
Upgrade = Callable[[Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Collected:
    """A checkpoint's files of one sharded value, and the longest that its members' changes waited, in seconds."""

    files: list[ShardFile]
    stalled: float


class Sharded:
    """See `Context.sharded`."""

    def __init__(self, context: Peers[Any], checkpoints: Checkpoints, name: str, role: str,
                 upgrade: Upgrade | None) -> None:  # fmt: skip
        self.context, self.checkpoints, self.name, self.role = context, checkpoints, name, role
        self._upgrade = upgrade or dict
        self._step: int | None = None  # that was begun last
        self.restored = False

    # ---- a checkpoint

    @property
    def directory(self) -> Path:
        """Where the shards are that rank 0 sees."""
        return self.checkpoints.directory / rundir.SHARDS

    def begin(self, step: int) -> None:
        """Has every member capture its share: as it is now, or, where it is behind, once it has made `step`. Training
        goes on. Raises CheckpointError.
        """
        if step == self._step:
            return  # it was begun before the step was made
        stem, self._step = self.checkpoints.stem(step), None
        settings = self.context.settings
        if settings.checkpoint_shards == "auto":  # members that see it write to it
            try:
                (self.directory / stem).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{stem} cannot be written to {self.directory}: {error.strerror}") from error
        order = Order(step, stem, self.context.generation, settings.checkpoint_shards,
                      *self.checkpoints.kept_and_dropped())  # fmt: skip
        self._each(shards.begin, self.name, order)
        self._step = step

    def collect(self, step: int) -> Collected:
        """The files of `step`, once all are on disk. Raises CheckpointError."""
        stem, self._step = self.checkpoints.stem(step), None
        with ThreadPoolExecutor(len(self._members)) as pool:
            collected = list(pool.map(partial(self._collect, stem), self._members))
        return Collected([file for file, _ in collected], max(stalled for _, stalled in collected))

    def _collect(self, stem: str, peer: Peer) -> tuple[ShardFile, float]:
        """Waits for the file that `peer` writes, or writes here what it sends."""
        sent, file = self._items(stem, peer), None
        match next(sent):
            case Written(file=ShardFile() as file, stalled=stalled):
                return file, stalled
            case dict() as columns:
                ended: list[Written] = []

                def blocks() -> Iterator[Tensor]:
                    for item in sent:
                        if isinstance(item, Written):
                            ended.append(item)
                            return
                        yield item

                try:
                    file = shardfile.write(self.directory / stem, f"{self.name}-{peer.name}.safetensors", columns,
                                           blocks())  # fmt: skip
                except ShardError as error:
                    raise CheckpointError(str(error)) from error
                return file, ended[0].stalled
            case other:
                raise CheckpointError(f"{peer.name} answers {type(other).__name__}")

    def _items(self, stem: str, peer: Peer) -> Iterator[Any]:
        """What `peer` sends, one call ahead."""
        call = partial(self._ask, peer, shards.next_item, self.name, stem)
        ahead = call()
        while True:
            item = ahead()  # while training goes on; a drain has a deadline of its own
            if isinstance(item, Problem):
                raise CheckpointError(item.text)
            if not isinstance(item, Written):
                ahead = call()
            if item is not None:
                yield item

    # ---- back

    def load(self, stem: str, files: list[ShardFile]) -> None:
        """Has every member read its share out of `files`. Raises CheckpointError where one of them cannot be used,
        UsageError where they do not fit this program.
        """
        local = shards.held(self.directory, stem, files)
        holders = {name: peer.name for peer, names in self._each(shards.holds, self.name, stem, files)
                   for name in names}  # fmt: skip
        if self.context.me in self._members:  # which can be asked for pieces
            holders |= dict.fromkeys(local, self.context.me.name)
        missing = [file.name for file in files if file.name not in holders and file.name not in local]
        if missing:
            raise CheckpointError(f"{stem}: {missing[0]} is missing or torn")
        problems = self._each(shards.load, self.name, stem, files, holders, timeout=LOAD_SECONDS)
        for problem in (problem for _, problem in problems if problem is not None):
            raise UsageError(f"{stem}: {problem.text}") if problem.usage else CheckpointError(problem.text)
        self.restored = True

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a checkpoint has the members' files."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Gives each member its rows of a whole value, as earlier versions saved it. Raises UsageError."""
        whole = self._upgrade(state)
        shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        for peer, rows in self._each(shards.prepare, self.name, shapes):
            if isinstance(rows, Problem):
                raise UsageError(rows.text)
            under_way: deque[Callable[[], Any]] = deque()
            for name, (first, step, count) in rows.items():
                share = whole[name][first::step][:count]
                size = max(1, BLOCK // max(1, share[:1].nbytes))
                for begin in range(0, count, size):
                    values = share[begin : begin + size].clone()  # RPC sends a tensor's whole memory
                    under_way.append(self._ask(peer, shards.put, self.name, name, begin, values))
                    if len(under_way) > AHEAD:
                        under_way.popleft()()
            for answer in under_way:
                answer()
        self.restored = True

    # ---- calls

    @property
    def _members(self) -> list[Peer]:
        members = self.context.peers(self.role)
        if not members:
            raise PeerLostError(f"no {self.role} is left")
        return members

    def _ask(self, peer: Peer, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Callable[[], Any]:
        """Calls `function` at `peer`; what is returned waits for the answer."""
        if peer == self.context.me:
            return partial(function, *args)
        return self.context.call(peer, function, *args, timeout=timeout).wait  # type: ignore[no-any-return]

    def _each(self, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> list[tuple[Peer, Any]]:
        """Calls `function` at every member at once; their answers."""
        members = self._members
        others = {peer: self._ask(peer, function, *args, timeout=timeout) for peer in members}
        first = {peer: ask() for peer, ask in others.items() if peer == self.context.me}
        return [(peer, first[peer] if peer in first else self._answer(others[peer])) for peer in members]

    def _answer(self, ask: Callable[[], Any]) -> Any:
        return ask()
