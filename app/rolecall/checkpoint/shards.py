"""A rank's share of a sharded value: captures, writes and reads it.

Rank 0 (sharded.py) calls the methods of `Shares`. They return the errors that rank 0 tells apart.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from rolecall.checkpoint import shardfile, shardfiles
from rolecall.checkpoint.capture import Capture, CaptureError, Rows
from rolecall.checkpoint.shard_messages import Begin, Earlier, Item, Order, Problem, Written
from rolecall.checkpoint.shardfile import Column, ShardError, ShardFile
from rolecall.checkpoint.shardfiles import Shapes
from rolecall.declare.remote import remote
from rolecall.errors import UsageError
from rolecall.record import rundir

Part = tuple[str, dict[str, Column], Iterable[Tensor]]  # a file: its name, its columns, their bytes
POLL_SECONDS = 0.5  # that a call waits for the next item
SHARE_SECONDS = 600.0  # that a call waits for its share


class Share:
    """This rank's share of the sharded value `name`, which rank 0 saves and restores as a `Sharded`; `context` is its
    `Context`.

    `rows()` are its tensors, by name. `prepare(shapes)` makes room for a checkpoint whose whole tensors have these
    shapes, and returns the tensors to fill; by default `rows()`. `at(step, begin)` calls `begin` once this rank has
    made `step`; by default at once, which is right if rank 0 saves between the steps.

    If the role stays, its `attached` has a block `with share.reset():`.
    """

    def __init__(
        self,
        context: Any,
        name: str,
        rows: Callable[[], Mapping[str, Rows]],
        prepare: Callable[[Shapes], Mapping[str, Rows]] | None = None,
        at: Callable[[int, Callable[[], None]], object] = lambda step, begin: begin(),
    ) -> None:
        self.context, self.name, self._rows, self._at = context, name, rows, at
        self._prepare = prepare or (lambda shapes: shardfiles.same_shapes(rows, shapes))
        self._capture: Capture | None = None
        self.changed = True  # since the last capture
        self._drained = False  # the last capture was a drain's: later changes are lost
        self._items: queue.Queue[Item] = queue.Queue(1)  # of the newest order
        self._stem = ""
        self._targets: Mapping[str, Rows] = {}
        self._lock = threading.Lock()
        self._restoring = threading.Lock()  # one call at a time sets rows
        # generation and join for which the share is ready; None before the first ones
        self._ready_for: tuple[int, int] | None = None
        self._ready = threading.Condition()
        self._resets = 0
        context.shares.add(self)

    # ---- generations

    @contextlib.contextmanager
    def reset(self) -> Iterator[None]:
        """Surrounds what `attached` of a role that stays does with the rows: gives up the checkpoints that an ended
        generation began to write or read. Those of the new one wait for the end of the block, which stops all changes
        of the rows. Raises TimeoutError if a read does not end within PHASE_TIMEOUT.
        """
        attachment = self._attachment()
        if self._ready_for not in (None, attachment):
            self._resets += 1  # what began before ends by itself
            limit = self.context.settings.phase_timeout
            if not self._restoring.acquire(timeout=limit):
                raise TimeoutError(f"{self}: a read did not end within PHASE_TIMEOUT={limit:g} s; is its disk hanging?")
            self._give_up()
            self._restoring.release()
        yield
        with self._ready:
            self._ready_for = attachment
            self._ready.notify_all()

    def _give_up(self) -> None:
        """Gives up the newest capture, and forgets earlier checkpoints."""
        if (capture := self._capture) is not None:
            capture.give_up("the generation has ended")
        self._capture, self._stem, self._items = None, "", queue.Queue(1)
        self._targets, self.changed, self._drained = {}, True, False

    def _attachment(self) -> tuple[int, int]:
        return self.context.generation, self.context.me.join

    def _await_ready(self) -> int:
        """Waits until the share is ready for this generation. Returns the number of resets before."""

        def is_ready() -> bool:
            attachment = self._attachment()
            self._ready_for = self._ready_for or attachment  # nothing of the first one is to be reset
            return self._ready_for == attachment

        limit = self.context.settings.phase_timeout
        with self._ready:
            if not self._ready.wait_for(is_ready, limit):
                raise TimeoutError(
                    f"{self} was not reset within PHASE_TIMEOUT={limit:g} s of a new generation; a role that stays "
                    "needs `with share.reset():` in its method `attached`"
                )
            return self._resets

    # ---- updates

    def before(self, begin: int, end: int) -> None:
        """To be called before the share's rows `begin` to `end` change. May wait while a checkpoint is written."""
        self._change()
        if (capture := self._capture) is not None:
            capture.before(begin, end)

    def before_rows(self, rows: Tensor) -> None:
        """To be called before the share's `rows` [n] int64, all different, change. May wait while a checkpoint is
        written.
        """
        self._change()
        if (capture := self._capture) is not None:
            capture.before_rows(rows)

    def _change(self) -> None:
        self.changed = True
        if self._drained:
            self._drained = False  # once
            text = "rows change after a drain's checkpoint, which lacks them: stop the writers by `settled` of steps()"
            self.context.logger.warning(text, share=str(self))

    # ---- checkpoints

    @property
    def directory(self) -> Path:
        """The folder of this rank's shards."""
        path: Path = self.context.settings.checkpoint_dir / rundir.SHARDS
        return path

    def begin(self, order: Order) -> None:
        """Captures the rows, now or after the order's step, and sends or writes them in a thread."""
        resets = self._await_ready()
        self.look(order)
        if resets != self._resets:
            return
        with self._lock:
            if self._capture is not None:
                self._capture.give_up("a newer checkpoint was begun")
            self._stem, self._items = order.stem, queue.Queue(1)
        items = self._items

        def start() -> None:
            if resets != self._resets:
                return
            self.changed = False  # before the capture, which may lack concurrent changes
            self._capture = capture = self.captured(order)
            self._drained = order.drain
            threading.Thread(target=self._run, args=(order, capture, items), daemon=True).start()

        self._at(order.step, start)

    def look(self, order: Order) -> None:
        """Does the disk work of a capture ahead: nothing may wait in `captured`."""

    def captured(self, order: Order) -> Capture:
        """A capture of the rows."""
        return Capture(self._rows(), self.context.settings.rpc_timeout / 2)

    def parts(self, capture: Capture) -> Iterator[Part]:
        """The files to write. The bytes of a file are consumed before the next file is requested."""
        columns = {name: Column.of(rows) for name, rows in capture.names.items()}
        yield f"{self}.safetensors", columns, capture.read()

    def earlier(self, order: Order, capture: Capture, direct: bool) -> Earlier | None:
        """The files of an earlier checkpoint that this one shares; links them if this rank writes (`direct`). Raises
        ShardError.
        """
        return None

    def direct(self, order: Order) -> bool:
        """Whether this rank writes its files."""
        return order.mode == "direct" or (order.mode == "auto" and (self.directory / order.stem).is_dir())

    def _run(self, order: Order, capture: Capture, items: queue.Queue[Item]) -> None:
        files, folder = [], self.directory / order.stem
        try:
            if direct := self.direct(order):
                if rundir.read_generation(self.directory.parent).number > order.generation:
                    raise ShardError(f"generation {order.generation} is over: nothing written")
                rundir.prune_shards(self.directory.parent, {*order.kept, order.stem}, order.dropped)
            if earlier := self.earlier(order, capture, direct):
                self._send(earlier, items)
            for name, columns, blocks in self.parts(capture):
                if direct:
                    files.append(shardfile.write(folder, name, columns, blocks))
                    continue
                self._send(Begin(name, columns), items)
                for block in blocks:
                    # sent later: the capture may use its memory again
                    self._send(block.clone() if block.untyped_storage().nbytes() > block.nbytes else block, items)
            if direct and not files:
                shardfile.sync(folder)
            self._send(Written(files, capture.stalled), items)
        except (ShardError, CaptureError, UsageError) as error:
            capture.give_up(str(error))
            self._send(Problem(f"{self}: {error}"), items)
        except Exception as error:  # whatever it is, the training goes on
            capture.give_up(repr(error))
            self.context.logger.exception("shard not written", share=str(self))
            self._send(Problem(f"{self}: {error!r}"), items)
        finally:
            if self._capture is capture:
                self._capture = None

    def _send(self, item: Item, items: queue.Queue[Item]) -> None:
        while self._items is items:  # until another checkpoint is begun
            with contextlib.suppress(queue.Full):
                items.put(item, timeout=POLL_SECONDS)
                return

    def __str__(self) -> str:
        return f"{self.name}-{self.context.me.name}"

    def next(self, stem: str) -> Item | None:
        """What comes next of the checkpoint `stem`; None if it is not there yet."""
        if stem != self._stem:
            return Problem(f"{self}: another checkpoint was begun")
        try:
            return self._items.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None

    # ---- back from a checkpoint

    def load(self, stem: str, files: list[ShardFile], holders: dict[str, str]) -> Problem | None:
        """Reads the rows here out of `files`, here or, by name, at one of `holders`."""
        resets = self._await_ready()
        try:
            with self._restoring:
                self._load(stem, files, holders, resets)
        except UsageError as error:
            return Problem(str(error), usage=True)
        except ShardError as error:
            return Problem(f"{stem}: {error}")
        return None

    def _load(self, stem: str, files: list[ShardFile], holders: dict[str, str], resets: int) -> None:
        """See `load`. Raises ShardError, UsageError."""
        targets = self._prepare(shardfiles.shapes(files))
        for file in files:
            if not shardfiles.overlaps(file, targets):
                continue
            read = shardfile.reader(self.directory / stem / file.name)
            if file.name not in shardfiles.held(self.directory, stem, [file]):
                read = self._remote(stem, file, holders[file.name])

            def read_on(place: int, length: int, read: shardfile.Read = read) -> Tensor:
                if resets != self._resets:
                    raise ShardError("the generation has ended")
                return read(place, length)

            shardfiles.fill(file, read_on, targets)

    def _remote(self, stem: str, file: ShardFile, holder: str) -> shardfile.Read:
        """Reads a file at the rank `holder`, one block ahead."""
        ahead: dict[tuple[int, int], Future[Tensor | Problem]] = {}

        def ask(place: int, length: int) -> Future[Tensor | Problem]:
            piece = (place, length)
            call: Future[Tensor | Problem] = self.context.internal_calls.call(
                holder, Shares.read_piece, stem, file.name, *piece
            )
            return call

        def read(place: int, length: int) -> Tensor:
            future = ahead.pop((place, length), None) or ask(place, length)
            following = (place + length, min(length, file.length - place - length))
            if following[1] > 0:
                ahead[following] = ask(*following)
            piece = future.result()
            if isinstance(piece, Problem):
                raise ShardError(piece.text)
            return piece

        return read

    def prepare(self, shapes: Shapes) -> dict[str, tuple[int, int, int]] | Problem:
        """Makes room for whole tensors of these shapes. Answers which rows are here: first, step, count."""
        self._await_ready()
        try:
            with self._restoring:
                self._targets = self._prepare(shapes)
        except UsageError as error:
            return Problem(str(error), usage=True)
        return {name: (rows.first, rows.step, len(rows)) for name, rows in self._targets.items()}

    def put(self, name: str, begin: int, values: Tensor) -> None:
        """Sets the rows here from `begin` on."""
        with self._restoring:
            rows = self._targets[name]
            rows.put(values, begin, rows.first, rows.step)


# ---- the shares of this process


class Shares:
    """A worker's shares, by name, as its peers call them. A call may arrive before the job has made its share."""

    directory = Path()  # with this rank's shards

    def __init__(self) -> None:
        self._futures: dict[str, Future[Share]] = {}
        self._lock = threading.Lock()

    def _future(self, name: str) -> Future[Share]:
        with self._lock:
            return self._futures.setdefault(name, Future())

    def add(self, share: Share) -> None:
        """Makes `share` known, in place of an earlier one."""
        self.directory = share.directory
        if self._future(share.name).done():
            del self._futures[share.name]
        self._future(share.name).set_result(share)

    def _get(self, name: str) -> Share:
        """The share called `name`. Raises TimeoutError if there is none within SHARE_SECONDS."""
        return self._future(name).result(SHARE_SECONDS)

    @remote
    def begin(self, name: str, order: Order) -> None:
        """Has the share captured, now or once its rank has made the order's step."""
        self._get(name).begin(order)

    @remote
    def changed(self, name: str) -> bool:
        """Whether the share has changed since it was captured last."""
        return self._get(name).changed

    @remote
    def next_item(self, name: str, stem: str) -> Item | None:
        """What comes next of the share in the checkpoint `stem`."""
        return self._get(name).next(stem)

    @remote
    def holds(self, name: str, stem: str, files: list[ShardFile]) -> list[str]:
        """The names of those of `files` that are in this rank's CHECKPOINT_DIR."""
        return shardfiles.held(self._get(name).directory, stem, files)

    @remote
    def read_piece(self, stem: str, file: str, place: int, length: int) -> Tensor | Problem:
        """Bytes of a file in this rank's CHECKPOINT_DIR."""
        if "/" in stem or "/" in file:
            return Problem(f"{stem}/{file} is no shard")
        try:
            return shardfile.reader(self.directory / stem / file)(place, length)
        except ShardError as error:
            return Problem(str(error))

    @remote
    def load(self, name: str, stem: str, files: list[ShardFile], holders: dict[str, str]) -> Problem | None:
        """Reads the share out of the files of a checkpoint."""
        return self._get(name).load(stem, files, holders)

    @remote
    def prepare(self, name: str, shapes: Shapes) -> dict[str, tuple[int, int, int]] | Problem:
        """Makes room for whole tensors."""
        return self._get(name).prepare(shapes)

    @remote
    def put(self, name: str, column: str, begin: int, values: Tensor) -> None:
        """Sets rows of the share."""
        self._get(name).put(column, begin, values)
