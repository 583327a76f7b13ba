"""Rank 0's handle on a value that the members of a role hold: they capture, write and read their shares."""

from __future__ import annotations

import contextlib
import glob
import math
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.checkpoint import shardfile
from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints
from rolecall.checkpoint.shardfile import ShardFile
from rolecall.checkpoint.shards import Order, Problem, Shares, Written
from rolecall.config import Settings
from rolecall.declare.task import Peer
from rolecall.errors import CallError, CallTimeoutError, PeerLostError, RemoteError, UsageError
from rolecall.record import rundir
from rolecall.wire import clock


class Sharded:
    """Rank 0's handle on a value of which every member of `role` holds a `Share` with this `name`. As part of the
    state that `restore` is given, it is written while training goes on, and read by any number of members.

    A subclass may add a small state of its own by `state_dict` and `load_state_dict`.
    """

    def __init__(self, context: Any, name: str, role: str) -> None:
        """`context` is this rank's `Context`. Raises UsageError at another rank than rank 0."""
        self.context, self.name, self.role = context, name, role
        self.checkpoints: Checkpoints = context.require_saver().checkpoints
        self.settings: Settings = context.settings
        self._step: int | None = None  # of the newest order
        self._attempts = dict[str, int]()  # earlier orders of the newest checkpoint, by its name
        self._captured: list[Peer] = []  # whose shares the newest checkpoint has
        self._collected: tuple[int, Written] | None = None  # the newest, of all members
        self._mark = Path()  # of the newest order
        self.restored = False

    # ---- a checkpoint

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
        self.checkpoints.require_current()  # a newer generation's unfinished shards are not this one's to delete
        kept = tuple(path.stem for path in self.checkpoints.files())
        rundir.prune_shards(self.checkpoints.directory, {*kept, stem})
        folder = self._folder(stem)
        self._mark = folder / f".{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._mark.touch()  # members that see it write to the folder
            if stem not in kept:  # what an attempt that failed has left takes room
                for file in folder.glob(f"{glob.escape(self.name)}-{self.role}_*"):
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{stem} cannot be written to {folder.parent}: {error.strerror}") from error
        self._attempts = {stem: self._attempts.get(stem, -1) + 1}
        order = Order(
            step,
            stem,
            self.context.generation,
            kept,
            self._mark.name,
            drain=self.context.draining,
            attempt=self._attempts[stem],
        )
        self._captured = [peer for peer, _ in self._each(Shares.begin, self.name, order)]
        self._step = step

    def collect(self, step: int) -> Written:
        """The files of `step`, once all are on disk, and the longest that a member's changes waited. Raises
        CheckpointError.
        """
        if self._collected is not None:
            return self._collected[1]
        stem, self._step = self.checkpoints.stem(step), None
        try:
            shares = [self._collect(stem, peer) for peer in self._captured]
        except CallError as error:
            raise CheckpointError(f"{stem}: {error}") from error
        files = [file for share in shares for file in share.files]
        self._require_held(stem, files)
        with contextlib.suppress(OSError):
            self._mark.unlink(missing_ok=True)
        self._collected = step, Written(files, 0.0)
        return Written(files, max(share.stalled for share in shares))

    def _collect(self, stem: str, peer: Peer, seconds: float = math.inf) -> Written:
        """Waits for the files of `peer`. Raises CheckpointError, as if nothing moves for `seconds` or PHASE_TIMEOUT."""
        limit, done, moved = self.settings.phase_timeout, -1, clock.now()
        setting = f"PHASE_TIMEOUT={limit:g}" if limit <= seconds else f"{seconds:g}"
        while True:
            match self._ask(peer, Shares.written, self.name, stem)():  # while training goes on
                case Written() as written:
                    return written
                case Problem(text):
                    raise CheckpointError(text)
                case more if more != done:
                    done, moved = more, clock.now()
                case _ if clock.now() - moved > min(limit, seconds):
                    raise CheckpointError(
                        f"{stem}: {peer.name} has written nothing for {setting} s; is its disk hanging?"
                    )

    # ---- back

    def load(self, stem: str, files: list[ShardFile]) -> None:
        """Makes every member read its share from `files`. Raises CheckpointError if one of them cannot be used,
        UsageError if they do not fit this program.
        """
        self._require_held(stem, files)
        problems = self._each(Shares.load, self.name, stem, files, timeout=self.settings.phase_timeout)
        for problem in (problem for _, problem in problems if problem is not None):
            raise UsageError(f"{stem}: {problem.text}") if problem.usage else CheckpointError(problem.text)
        self.restored = True

    def _folder(self, stem: str) -> Path:
        return self.checkpoints.directory / rundir.SHARDS / stem

    def _require_held(self, stem: str, files: list[ShardFile]) -> None:
        """Raises CheckpointError if one of `files` is not in rank 0's folder with its full length."""
        for file in files:
            if not shardfile.is_held(self._folder(stem), file):
                raise CheckpointError(f"{stem}: {file.name} is missing or torn")

    def state_dict(self) -> dict[str, Any]:
        """The state beside the members' files."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state beside the members' files. Raises UsageError for a whole one, of an earlier version."""
        if state:
            raise UsageError(f"{self.name}: is a checkpoint of an earlier version; finish the run with that version")

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
