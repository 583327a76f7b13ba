"""State that members keep in rank 0's checkpoints: each packs its own and writes it, as its share of one value.

A capture is that of a share: a member packs its state between two changes, as rank 0 orders it between two steps, and
writes it while both go on. Unlike other shares, a member's may be missing: then the one that the checkpoint before has
is part of the next one, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from rolecall import telemetry
from rolecall.checkpoint import shardfile
from rolecall.checkpoint.capture import Capture, Rows
from rolecall.checkpoint.checkpoint import KEPT, CheckpointError, Snapshot, pack, unpack
from rolecall.checkpoint.saving import load_state, saved_state
from rolecall.checkpoint.sharded import Sharded
from rolecall.checkpoint.shardfile import Column, Shapes, ShardError, ShardFile
from rolecall.checkpoint.shards import NewFile, Order, Problem, Share, Shares, Written
from rolecall.declare.remote import remote
from rolecall.declare.task import Peer
from rolecall.errors import CallError, RankError, RemoteError, UsageError
from rolecall.wire.session import serving

CHANGE_SECONDS = 1.0  # that a capture waits for the end of a change
ORDER_SECONDS = 2.0  # that a checkpoint waits for a member to say anything
WRITE_SECONDS = 60.0  # that it waits for a member that writes nothing
TRIES = 3  # to read a state: its checkpoint may be deleted meanwhile, after a newer one was written

Place = tuple[str, ShardFile]  # the stem of a checkpoint, and a member's file in it


class Kept(dict[str, Any]):
    """A member's state, by name, which checkpoints of rank 0 hold; `Context.keep` returns it."""

    def __init__(self, context: Any, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        saved_state(state)
        self._context, self._share = context, _KeptShare(context, KEPT, self._rows, self._room, self._capture)
        self._turn = threading.Condition()  # for all that follows
        self._changer: int | None = None  # the thread that changes the state
        self._blocks = 0  # of it, one within the other
        self._wanted = False  # a capture waits for the end of a change
        self._packed: Tensor | None = None  # at that end [bytes] uint8, for the capture
        self._first: Tensor | None = None  # as it was made, until a checkpoint has it

    @contextlib.contextmanager
    def changing(self) -> Iterator[Kept]:
        """The block changes the state: checkpoints have it as it is before or after. One thread changes it at a time;
        the others wait. It is not for a block that has an `await`. Raises PeerLostError if the generation of the call
        that this thread carries out has ended."""
        with self._turn:
            self._take(None)
        try:
            session = serving.get()
            if session is not None and session.ended:
                raise session.error()
            self._share.changed = True
            yield self
        finally:
            self._leave()

    def _take(self, seconds: float | None) -> None:
        """With `_turn` held: this thread may change the state. Raises TimeoutError if another one does so for
        `seconds`; None: as long as it does, within the deadline of the call."""
        me = threading.get_ident()
        if not self._turn.wait_for(lambda: self._changer in (None, me), seconds):
            raise TimeoutError
        self._changer = me
        self._blocks += 1

    def _leave(self) -> None:
        with self._turn:
            self._blocks -= 1
            if self._blocks:
                return
            try:
                if self._wanted:
                    self._packed, self._wanted = self._pack(), False
            finally:
                self._changer = None
                self._turn.notify_all()

    def _pack(self) -> Tensor:
        return torch.frombuffer(pack(saved_state(self), {}), dtype=torch.uint8)

    # ---- a checkpoint

    def _capture(self, step: int, begin: Callable[[], None]) -> None:
        """Calls `begin` with the state packed: as it is, or at the end of the change under way. If that is long, with
        what was packed at the end of one for an earlier checkpoint, too late. Raises ShardError if there is nothing."""
        with self._turn:
            self._wanted = self._changer is not None
            if not self._wanted:
                self._packed = self._pack()
            else:
                self._turn.wait_for(lambda: not self._wanted, CHANGE_SECONDS)
            if self._packed is None:
                raise ShardError(f"its state has been changing for {CHANGE_SECONDS:g} s")
            begin()
            self._packed = None
            if self._share.is_saved:
                self._first = None

    def _rows(self) -> dict[str, Rows]:
        assert self._packed is not None
        return {self._context.me.name: Rows((self._packed,), len(self._packed), frozen=True)}

    # ---- back

    def load(self) -> None:
        """Sets the state to that of the checkpoint which rank 0's state is of, or of a newer one; without one, as it
        was made. Waits for rank 0 to `restore`. Raises RankError if it cannot be read, UsageError if it does not fit,
        and PeerLostError."""
        limit, me = self._context.settings.phase_timeout, self._context.me
        try:
            with self._turn:
                self._take(limit)
        except TimeoutError:
            raise RankError(
                f"a change of what {me.name} keeps has not ended within PHASE_TIMEOUT={limit:g} s"
            ) from None
        try:
            with self._share.reset():
                self._packed = None
            if self._first is None and not self._share.is_saved:
                self._first = self._pack()
            self._load()
        finally:
            self._leave()

    def _load(self) -> None:
        context, problem = self._context, ""
        name, join = context.me.name, context.me.join
        calls = context.internal_calls.options(timeout=context.settings.phase_timeout)
        for _ in range(TRIES):
            place: Place | None = calls.call(context.rank0, KeptStates.kept_by, name, join).result()
            if place is None:
                if self._first is None:  # only if a newer checkpoint than rank 0's had it
                    raise RankError(f"the checkpoint has no state of {name}, which begins anew")
                self._set(self._first, "")
                return
            stem, file = place
            self._room_for = torch.empty(0, dtype=torch.uint8)
            read = self._share.load(stem, [file])
            if read is None:
                self._set(self._room_for, f"{stem}: {name}")
                return
            problem = read.text
        raise RankError(f"what {name} keeps cannot be read: {problem}")

    def _room(self, shapes: Shapes) -> dict[str, Rows]:
        (size,) = shapes[self._context.me.name]
        self._room_for = torch.empty(size, dtype=torch.uint8)
        return {self._context.me.name: Rows((self._room_for,), size)}

    def _set(self, packed: Tensor, file: str) -> None:
        array: Any = packed.numpy()
        try:
            saved = unpack(file, memoryview(array))["state"]
        except CheckpointError as error:
            raise RankError(str(error)) from error
        load_state(self, saved, file)


class _KeptShare(Share):
    """The share that is what a member keeps. Its files are named by their checkpoints: they are linked into later
    ones."""

    _stem = ""  # of the newest capture that rank 0 has asked for: it may have given up earlier ones
    is_saved = False  # a checkpoint may have one of its captures

    def captured(self, order: Order) -> Capture:
        """See `Share.captured`."""
        self.is_saved = self.is_saved or self._stem in order.kept
        return super().captured(order)

    def written(self, stem: str) -> Written | Problem | int:
        """See `Share.written`."""
        answer = super().written(stem)
        if isinstance(answer, Written):
            self._stem = stem
        return answer

    def parts(self, order: Order, capture: Capture) -> Iterator[NewFile]:
        """See `Share.parts`."""
        columns = {name: Column.of(rows) for name, rows in capture.names.items()}
        yield f"{self}.{order.stem}.safetensors", columns, capture.read()


def _unanswered(calls: dict[Peer, Future[Any]]) -> dict[Peer, Future[Any]]:
    """Those of `calls` that have no answer within ORDER_SECONDS."""
    wait(calls.values(), ORDER_SECONDS)
    return {peer: call for peer, call in calls.items() if not call.done()}


class KeptStates(Sharded):
    """Rank 0's handle on what members of any role keep, and what they ask for theirs."""

    def __init__(self, context: Any) -> None:
        super().__init__(context, KEPT, "*")
        self._keepers = dict[str, int]()  # the joins of members, by name, that have asked for their state
        self._stem, self._files = "", dict[str, ShardFile]()  # of the newest checkpoint, by member
        self._next: tuple[str, dict[str, ShardFile]] | None = None  # of one that may have come to nothing
        self._restored: Future[None] = Future()
        self._lock = threading.Lock()

    @property
    def used(self) -> bool:
        """Whether checkpoints hold what members keep."""
        return bool(self._keepers or self._files)

    @property
    def _members(self) -> list[Peer]:
        joins, lost = self._keepers, self.context.lost
        return [peer for peer in self.context.members if peer.name not in lost and joins.get(peer.name) == peer.join]

    # ---- a checkpoint

    def _each(self, method: Callable[..., Any], *args: Any, timeout: float = -1.0) -> list[tuple[Peer, Any]]:
        """The answers of all members but those that say nothing. Raises UsageError if one cannot be saved at all."""
        send = self.context.internal_calls.options(timeout=self.settings.phase_timeout).call
        calls = {peer: send(peer, method, *args) for peer in self._members}
        late, silent = _unanswered(calls), dict[Peer, Future[Any]]()
        while late:  # a large state takes long to pack
            asked = _unanswered({peer: send(peer, Shares.changed, self.name) for peer in late})
            for call in asked.values():
                call.cancel()
            silent |= {peer: late.pop(peer) for peer in asked}
            late = _unanswered(late)
        answers = list[tuple[Peer, Any]]()
        for peer, call in calls.items():
            if peer in silent:
                call.cancel()
                self._missing(peer, f"has not answered within {ORDER_SECONDS:g} s")
                continue
            try:
                answers.append((peer, call.result()))
            except CallError as error:
                if isinstance(error, RemoteError) and isinstance(error.__cause__, UsageError):
                    raise UsageError(f"{peer.name}: {error.__cause__}") from error
                self._missing(peer, str(error))
        return answers

    def _missing(self, peer: Peer, problem: str) -> None:
        before = "its state of before stays" if peer.name in self._files else "it has none of its state"
        telemetry.log().warning(f"checkpoint: {before}", member=peer.name, problem=problem)

    def collect(self, step: int) -> Written:
        """The files of `step`: those that members have written, and of the others those of before. Raises
        CheckpointError."""
        if self._collected is not None:
            return self._collected[1]
        stem, self._step = self.checkpoints.stem(step), None
        files = dict[str, ShardFile]()

        def collect(peer: Peer) -> None:
            try:
                (files[peer.name],) = self._collect(stem, peer, WRITE_SECONDS).files
            except (CallError, CheckpointError) as error:
                self._missing(peer, str(error))

        with ThreadPoolExecutor(max(1, len(self._captured))) as pool:  # one that hangs holds no other up
            list(pool.map(collect, self._captured))
        for name, file in self._newest()[1].items():
            if name not in files:
                self._take_over(stem, file)
                files[name] = file
        self._require_held(stem, list(files.values()))
        written = Written(list(files.values()), 0.0)
        self._collected, self._next = (step, written), (stem, files)
        with contextlib.suppress(OSError):
            self._mark.unlink(missing_ok=True)
        return written

    def _take_over(self, stem: str, file: ShardFile) -> None:
        """Makes `file` of the newest checkpoint a part of the checkpoint `stem`."""
        try:
            shardfile.share(self._folder(self._stem) / file.name, self._folder(stem) / file.name)
            shardfile.sync(self._folder(stem), [file.name])
        except ShardError as error:
            raise CheckpointError(f"{stem}: {error}") from error

    def _newest(self) -> tuple[str, dict[str, ShardFile]]:
        """The newest checkpoint that was written or resumed from: its stem, and what members have in it."""
        with self._lock:
            if self._next and (self.checkpoints.directory / f"{self._next[0]}.pt").exists():
                (self._stem, self._files), self._next = self._next, None
            return self._stem, self._files

    # ---- back

    def offer(self, snapshot: Snapshot) -> None:
        """Members get what they have in `snapshot`, if `open` follows. Raises CheckpointError if a file cannot be
        used."""
        stem, files = snapshot.path.stem, dict[str, ShardFile]()
        for file in snapshot.shards.get(KEPT, []):
            path = self._folder(stem) / file.name
            try:
                ((name, column),) = file.columns.items()
                if column != Column("U8", (column.total,), column.total, 0, 1) or name in files:
                    raise ShardError(f"{file.name}: is no state of a member")
                if not shardfile.is_held(path.parent, file):
                    raise ShardError(f"{file.name} is missing or torn")
                for _ in shardfile.blocks(file, shardfile.reader(path)):
                    """Its checksum is compared."""
            except (ShardError, ValueError) as error:
                raise CheckpointError(f"{stem}: {error}") from error
            files[name] = file
        self._stem, self._files = stem, files

    def open(self) -> None:
        """Rank 0 has its state: members may have theirs."""
        if not self._restored.done():
            self._restored.set_result(None)

    @remote
    def kept_by(self, name: str, join: int) -> Future[Place | None]:
        """Where the state of the member `name`, which joined as `join`, is, once rank 0 has its own; None if nowhere.
        Checkpoints hold what it keeps from now on."""
        answer: Future[Place | None] = Future()

        def tell(_: object) -> None:
            self._keepers[name] = join
            stem, files = self._newest()
            answer.set_result((stem, files[name]) if name in files else None)

        self._restored.add_done_callback(tell)
        return answer
