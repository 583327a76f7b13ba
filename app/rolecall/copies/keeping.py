"""Rank 0's part: has members hold its checkpoints, and brings the newest back to its disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import Checkpoints, Copies
from rolecall.checkpoint.shardfile import ShardError
from rolecall.config import Settings
from rolecall.copies import choice
from rolecall.copies.choice import Claim, Known, Return, Source, Stem
from rolecall.copies.store import CopyError, Listing, Store, stem_of
from rolecall.errors import CallError, Drained, PeerLostError, UsageError
from rolecall.record import rundir
from rolecall.weights.exchange import Connection
from rolecall.wire.connecting import machine_id

BATCH_CHUNKS = 64  # of one call
IN_FLIGHT = 4  # calls to one member at a time
RETRY_SECONDS = 10.0  # after a checkpoint that could not be copied
LOG_REPEAT_SECONDS = 60.0  # between two log lines of copies that fail
LOOK_SECONDS = 1.0  # between two looks for a member that is waited for
QUICK = ("copies_claim", "copies_note", "copies_forget")  # methods whose answer does not wait for a large file
Problem = (CallError, CopyError, ShardError, UsageError, OSError)


class Wanted(NamedTuple):
    """A checkpoint that members are to hold, as rank 0's disk has it since the write of this `number`: one of the same
    step may take its place."""

    checkpoint: Stem
    number: int


class Keeper(Copies):
    """The copies of `checkpoints`, each at `settings.checkpoint_copies` members; `here` are those on this machine.
    `connect` waits up to some seconds for the generation, `members` returns the other ones that are in it, and
    `is_draining` says whether it is to end."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        here: Store,
        settings: Settings,
        connect: Callable[[float], Connection | None],
        members: Callable[[], list[str]],
        *,
        is_draining: Callable[[], bool],
        metrics: Any,
    ) -> None:
        self._checkpoints, self._here, self._settings = checkpoints, here, settings
        self._connect, self._members, self._is_draining, self._metrics = connect, members, is_draining, metrics
        self._mine = Store(checkpoints.directory, here.me, checkpoints.job)
        self._repaired = set[Stem]()
        self._machines = dict[str, str]()  # of members that were asked
        self._holders = dict[str, Wanted]()  # who holds what of this generation
        self._changed = threading.Condition()
        self._wanted: Wanted | None = None  # the newest checkpoint
        self._changes = self._done = 0  # of what is wanted or who is there; and with how many it has dealt
        self._over = False
        self._logged_at = float("-inf")
        self._short = False  # it was logged that there are too few members
        self._thread: threading.Thread | None = None
        self.logger = telemetry.log()

    # ---- calls

    def _ask(self, name: str, method: str, *args: Any) -> Callable[[], Any]:
        """Calls a method of the `Store` of a member. Returns a function that waits for the answer."""
        if name == self._here.me:
            return lambda: getattr(self._here, method)(*args)
        connection = self._connect(self._settings.connect_timeout)
        if connection is None:
            raise PeerLostError("the generation has ended")
        wait = 0.0 if method in QUICK else self._settings.phase_timeout
        return connection.ask(name, method, *args, wait=wait).result

    def _claims(self, patience: float = 0.0) -> dict[str, Claim]:
        """What the members say, and this machine's disk. A member that is silent may hold the newest checkpoint: it is
        asked again while it is here, for `patience` seconds at most; raises Drained if the generation is to end."""
        generation, claims = self._checkpoints.generation, dict[str, Claim]()
        names, told, end = [self._here.me, *self._members()], set[str](), time.monotonic() + patience
        while names:
            asked, names = {name: self._ask(name, "copies_claim", generation) for name in names}, []
            for name, answer in asked.items():
                try:
                    claims[name] = answer()
                except Problem as error:  # it was lost, or its disk fails: others may know what it holds
                    if name not in told:
                        self.logger.warning(
                            "a member does not say which copies it holds", member=name, problem=str(error)
                        )
                    told.add(name)
                    if _is_silence(error) and time.monotonic() < end:
                        names.append(name)
            if names:
                self._await_change(LOOK_SECONDS, max(self._mine.held(), default=(0, 0)))
                names = [name for name in names if name in self._members()]
        self._machines |= {name: claim.machine for name, claim in claims.items()}
        return claims

    # ---- back

    def restore(self) -> None:
        """The newest checkpoint that members hold is on rank 0's disk from now on. Waits for a member that has it, for
        REJOIN_TIMEOUT at most; raises UsageError if it does not come, or if no copy can be used, and Drained if it
        may come with another generation."""
        claims = self._claims(self._settings.rejoin_timeout)
        mine = max(self._mine.held(), default=None)
        if mine is None and not self._settings.resume:
            for name in claims:
                self._ask(name, "copies_forget")()
            return
        if source := choice.source(mine, claims):
            self._bring(source, claims)

    def repair(self, torn: str) -> bool:
        """The checkpoint file `torn` on rank 0's disk cannot be used. Brings it back, or else the newest that members
        hold if it is newer than the others on disk. Returns whether one was brought back; raises UsageError as
        `restore` does."""
        checkpoint = _stem(torn)
        if checkpoint in self._repaired:
            return False
        self._repaired.add(checkpoint)
        older = max((stem for stem in self._mine.held() if stem < checkpoint), default=None)
        source = choice.source(older, claims := self._claims(self._settings.rejoin_timeout))
        if source is not None:
            self._bring(source, claims)
        return source is not None

    def _bring(self, source: Source, claims: Collection[str]) -> None:
        limit, told = self._settings.rejoin_timeout, False
        back = Return(source, claims, time.monotonic() + limit)
        while True:
            stem = stem_of(back.checkpoint)
            while name := back.next():
                try:
                    self._pull(name, back.checkpoint)
                except Problem as error:
                    back.failed(name, str(error), lost=_is_silence(error))
                    self.logger.warning("a copy cannot be used", checkpoint=stem, member=name, problem=str(error))
                else:
                    self.logger.info("checkpoint brought back", checkpoint=stem, member=name)
                    return
            if not (absent := back.awaited(time.monotonic())):
                break
            if not told:
                told = True
                self.logger.warning(
                    "waiting for the newest checkpoint, which only members hold that are not here",
                    checkpoint=stem,
                    members=", ".join(absent),
                    deadline_s=limit,
                )
            self._await_change(min(LOOK_SECONDS, limit), back.checkpoint)
            back.look(self._claims())
        raise UsageError(
            f"CHECKPOINT_COPIES={self._settings.checkpoint_copies}: the newest checkpoint {stem} cannot be brought "
            f"back ({back.problem}); start what holds it, or set CHECKPOINT_COPIES=0 to go on from what rank 0's disk "
            "has"
        )

    def _await_change(self, seconds: float, newest: Stem) -> None:
        """Waits until a member joins or is lost, for some seconds at most. Raises Drained, with the step of the
        `newest` checkpoint, if the generation is to end."""
        with self._changed:
            self._changed.wait(seconds)
        if self._is_draining():
            raise Drained(newest[1])

    def _pull(self, name: str, checkpoint: Stem) -> None:
        """Fetches a checkpoint from a member."""
        listing: Listing = self._ask(name, "copies_listing", checkpoint)()
        if listing.checkpoint != checkpoint:
            raise CopyError(f"{stem_of(checkpoint)}: it sends another one")
        for number, missing in enumerate(self._mine.copies_begin(listing)):
            file = listing.files[number]
            asked = deque[tuple[list[int], Callable[[], Any]]]()
            for batch in _batches(missing):
                asked.append((batch, self._ask(name, "copies_read", checkpoint, file, batch)))
                if len(asked) == IN_FLIGHT:
                    self._take(checkpoint, number, asked)
            while asked:
                self._take(checkpoint, number, asked)
        self._mine.copies_commit(checkpoint)

    def _take(self, checkpoint: Stem, number: int, asked: deque[tuple[list[int], Callable[[], Any]]]) -> None:
        batch, answer = asked.popleft()
        self._mine.copies_put(checkpoint, number, batch, answer())

    # ---- copies of what rank 0 writes

    def written(self, name: str) -> None:
        """Members are to hold the checkpoint of this file name, which is on disk. Does not wait."""
        with self._changed:
            self._wanted = Wanted(_stem(name), self._wanted.number + 1 if self._wanted else 0)
            self._notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
                self._thread.start()

    def changed(self, name: str) -> None:
        """A member has joined, or was lost: it may be on another machine when it is back."""
        with self._changed:
            self._machines.pop(name, None)
            self._holders.pop(name, None)
            self._notify()

    def close(self) -> None:
        """Ends its thread."""
        with self._changed:
            self._over = True
            self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def wait(self) -> None:
        """Waits until members hold the newest checkpoint, for DRAIN_TIMEOUT at most."""
        seconds = self._settings.drain_timeout
        with self._changed:
            copied = self._changed.wait_for(lambda: self._thread is None or self._done == self._changes, seconds)
        if not copied:
            self.logger.warning("rank 0 ends before its last checkpoint was copied", waited_s=seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done != self._changes)
                if self._over:
                    return
                changes, wanted = self._changes, self._wanted
            problem = self._copy(wanted) if wanted else ""
            with self._changed:
                if not problem:
                    self._done = changes
                    self._changed.notify_all()
                elif self._changes == changes:
                    self._changed.wait(RETRY_SECONDS)

    def _copy(self, wanted: Wanted) -> str:
        """Has as many members as are wanted hold `checkpoint`. Returns what went wrong, which is logged."""
        count, checkpoint, problem = self._settings.checkpoint_copies, wanted.checkpoint, ""
        try:
            machines = self._machine_of_each()
            chosen = choice.holders(machines, machine_id(), count, self._holders)
            listing: Listing | None = None
            for name in chosen:
                if self._holders.get(name) == wanted:
                    continue
                try:
                    listing = listing or self._mine.copies_listing(checkpoint)
                    self._push(name, listing)
                    self._holders[name] = wanted
                except Problem as error:
                    if self._wanted != wanted or not self._mine.path(checkpoint).exists():
                        return ""  # a newer one has taken its place
                    problem = f"{name}: {error}"
            self._note(checkpoint, [name for name in chosen if self._holders.get(name) == wanted], machines)
            if len(chosen) < count and not self._short:
                self.logger.warning("fewer members than copies", copies=len(chosen), wanted=count)
            self._short = len(chosen) < count
        except Exception as error:  # without this thread, nothing would ever be copied
            problem = str(error) or repr(error)
        if problem:
            self._metrics.checkpoint_copy_failures.inc()
        if problem and time.monotonic() - self._logged_at > LOG_REPEAT_SECONDS:
            self._logged_at = time.monotonic()
            self.logger.warning("checkpoint not copied", checkpoint=stem_of(checkpoint), problem=problem)
        return problem

    def _machine_of_each(self) -> Mapping[str, str]:
        """The machine of each member that is here."""
        members = self._members()
        if not {*members} <= self._machines.keys():
            self._claims()
        return {name: self._machines[name] for name in members if name in self._machines}

    def _push(self, name: str, listing: Listing) -> None:
        """Sends a member what it lacks of a checkpoint."""
        missing = self._ask(name, "copies_begin", listing)()
        sent, total = deque[Callable[[], Any]](), 0
        for number, (file, chunks) in enumerate(zip(listing.files, missing, strict=True)):
            for batch in _batches(chunks):
                contents = self._mine.copies_read(listing.checkpoint, file, batch)
                piece = listing.checkpoint, number, batch, contents
                sent.append(self._ask(name, "copies_put", *piece))
                total += len(batch)
                if len(sent) == IN_FLIGHT:
                    sent.popleft()()
        while sent:
            sent.popleft()()
        self._ask(name, "copies_commit", listing.checkpoint, self._mine.held())()
        self.logger.debug("checkpoint copied", checkpoint=stem_of(listing.checkpoint), member=name, chunks=total)

    def _note(self, checkpoint: Stem, holders: list[str], members: Iterable[str]) -> None:
        """The members remember who holds the newest checkpoint."""
        if not holders:
            return
        known = Known(self._checkpoints.generation, checkpoint, tuple(holders))
        for answer in [self._ask(name, "copies_note", known) for name in members]:
            answer()


def _is_silence(error: Exception) -> bool:
    """Whether a member did not answer: what it holds may be sound."""
    return isinstance(error, CallError) and not error.is_remote


def _stem(name: str) -> Stem:
    match = rundir.NAME.fullmatch(name)
    assert match is not None
    return int(match.group(1)), int(match.group(2))


def _batches(chunks: list[int]) -> list[list[int]]:
    return [chunks[begin : begin + BATCH_CHUNKS] for begin in range(0, len(chunks), BATCH_CHUNKS)]
