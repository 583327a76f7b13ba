"""A rank's share of a sharded value: captures, writes and reads it.

A share's files lie in the folder of rank 0's checkpoint. A rank that sees this folder, by a mark that rank 0 makes in
it, writes and reads them there, any other one through rank 0, by the same methods of `Shares`. Rank 0 (sharded.py)
calls the others. They return the errors that their callers tell apart.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rolecall.checkpoint import shardfile
from rolecall.checkpoint.capture import Capture, CaptureError, Rows
from rolecall.checkpoint.shardfile import Column, Shapes, ShardError, ShardFile
from rolecall.config import Settings
from rolecall.declare.remote import remote
from rolecall.errors import CallError, RemoteError, UsageError
from rolecall.record import rundir

NewFile = tuple[str, dict[str, Column], Iterable[Tensor]]  # a file: its name, its columns, their bytes
Ask = Callable[..., Callable[[], Any]]  # calls a method of `Shares`; what it returns waits for the answer
Disk = Callable[..., Any]  # the answer of a method of `Shares` where a checkpoint's files are
POLL_SECONDS = 0.5  # that a call waits for the files of a share
SHARE_SECONDS = 600.0  # that a call waits for its share


@dataclass(frozen=True)
class Order:
    """Requests a capture of the state after `step`, for the checkpoint `stem` of `generation`. `kept` are the existing
    checkpoints; `mark` is a file in rank 0's folder; `drain`: the generation ends with this checkpoint; `attempt`:
    orders of this checkpoint before.
    """

    step: int
    stem: str
    generation: int
    kept: tuple[str, ...]
    mark: str
    drain: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class Problem:
    """Why a request failed; `usage` marks a problem that a retry cannot solve."""

    text: str
    usage: bool = False


@dataclass(frozen=True)
class Written:
    """A share's files in a checkpoint, and the seconds that updates waited."""

    files: list[ShardFile]
    stalled: float


@dataclass
class _Writing:
    """The newest checkpoint of a share, and how many operations on the disk are done."""

    stem: str
    done: int = 0
    answer: Future[Written | Problem] = field(default_factory=Future)


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
        self.settings: Settings = context.settings
        self._prepare = prepare or (lambda shapes: shardfile.same_shapes(rows, shapes))
        self._capture: Capture | None = None
        self.changed = True  # since the last capture
        self._drained = False  # the last capture was a drain's: later changes are lost
        self._writing = _Writing("")
        self._directory: Path = context.shares.directory
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
            limit = self.settings.phase_timeout
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
        self._capture, self._writing, self.changed, self._drained = None, _Writing(""), True, False

    def _attachment(self) -> tuple[int, int]:
        return self.context.generation, self.context.me.join

    def _await_ready(self) -> int:
        """Waits until the share is ready for this generation. Returns the number of resets before."""

        def is_ready() -> bool:
            attachment = self._attachment()
            self._ready_for = self._ready_for or attachment  # nothing of the first one is to be reset
            return self._ready_for == attachment

        limit = self.settings.phase_timeout
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

    def begin(self, order: Order) -> None:
        """Captures the rows, now or after the order's step, and writes them in a thread."""
        resets = self._await_ready()
        if (capture := self._capture) is not None:
            capture.give_up("a newer checkpoint was begun")
        self._writing = writing = _Writing(order.stem)

        def start() -> None:
            if resets != self._resets:
                return
            self.changed = False  # before the capture, which may lack concurrent changes
            self._capture = capture = self.captured(order)
            self._drained = order.drain
            threading.Thread(target=self._run, args=(order, capture, writing), daemon=True).start()

        self._at(order.step, start)

    def captured(self, order: Order) -> Capture:
        """A capture of the rows."""
        return Capture(self._rows(), self.settings.rpc_timeout / 2)

    def parts(self, order: Order, capture: Capture) -> Iterator[NewFile]:
        """The files to write. The bytes of a file are consumed before the next file is requested."""
        columns = {name: Column.of(rows) for name, rows in capture.names.items()}
        yield f"{self}.safetensors", columns, capture.read()

    def _run(self, order: Order, capture: Capture, writing: _Writing) -> None:
        answer: Written | Problem
        try:
            # not by the folder, which an earlier rank 0 may have left on a disk of its own
            here = (self._directory / order.stem / order.mark).exists()
            if here and rundir.read_generation(self._directory.parent).number > order.generation:
                raise ShardError(f"generation {order.generation} is over: nothing written")
            ask = self._asker(order.stem, here)

            def disk(method: Callable[..., Any], *args: Any) -> Any:
                if capture.problem:
                    raise CaptureError(capture.problem)
                writing.done += 1
                return ask(method, *args)()

            answer = Written(self._write(order, capture, disk), capture.stalled)
        except Exception as error:  # whatever it is, the training goes on
            known = isinstance(error, ShardError | CaptureError | UsageError | CallError)
            if not known:
                self.context.logger.exception("shard not written", share=str(self))
            problem = str(error) if known else repr(error)
            capture.give_up(problem)
            answer = Problem(f"{self}: {problem}")
        if self._capture is capture:
            self._capture = None
        writing.answer.set_result(answer)

    def _asker(self, stem: str, here: bool) -> Ask:
        """Calls methods of `Shares` for files of the checkpoint `stem`, here or at rank 0. Returns functions that wait
        for the answers, and raise ShardError.
        """
        if here:
            return lambda method, *args: partial(method, self.context.shares, stem, *args)
        calls = self.context.internal_calls.options(timeout=self.settings.phase_timeout)

        def wait(answer: Future[Any]) -> Any:
            try:
                return answer.result()
            except RemoteError as error:
                raise ShardError(str(error)) from error

        return lambda method, *args: partial(wait, calls.call(self.context.rank0, method, stem, *args))

    def _write(self, order: Order, capture: Capture, disk: Disk) -> list[ShardFile]:
        """Writes the captured rows. Returns all files of the share in this checkpoint."""
        files = []
        for name, columns, blocks in self.parts(order, capture):
            if order.attempt:  # what the one before still writes, late, is in other files
                name = name.replace(f"{self}.", f"{self}.{order.attempt}.", 1)
            files.append(shardfile.write(name, columns, blocks, partial(disk, Shares.write_piece, name)))
        disk(Shares.sync, [file.name for file in files])
        return files

    def __str__(self) -> str:
        return f"{self.name}-{self.context.me.name}"

    def written(self, stem: str) -> Written | Problem | int:
        """The files in the checkpoint `stem`; if they are not all written yet, how many operations are done."""
        writing = self._writing
        if stem != writing.stem:
            return Problem(f"{self}: another checkpoint was begun")
        with contextlib.suppress(TimeoutError):
            return writing.answer.result(POLL_SECONDS)
        return writing.done

    # ---- back from a checkpoint

    def load(self, stem: str, files: list[ShardFile]) -> Problem | None:
        """Reads the rows here out of `files`."""
        resets = self._await_ready()
        try:
            with self._restoring:
                self._load(stem, files, resets)
        except UsageError as error:
            return Problem(str(error), usage=True)
        except ShardError as error:
            return Problem(f"{stem}: {error}")
        return None

    def _load(self, stem: str, files: list[ShardFile], resets: int) -> None:
        """See `load`. Raises ShardError, UsageError."""
        targets = self._prepare(shardfile.shapes(files))
        for file in files:
            if not shardfile.overlaps(file, targets):
                continue
            ask = self._asker(stem, shardfile.is_held(self._directory / stem, file))

            def wait(answer: Callable[[], Tensor]) -> Tensor:
                if resets != self._resets:
                    raise ShardError("the generation has ended")
                return answer()

            def read(place: int, length: int, name: str = file.name, ask: Ask = ask) -> Callable[[], Tensor]:
                return partial(wait, ask(Shares.read_piece, name, place, length))

            shardfile.fill(file, read, targets)


# ---- the shares of this process


class Shares:
    """A worker's shares, by name, and the files of checkpoints in `directory`, as its peers call them. A call may
    arrive before the job has made its share.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._futures: dict[str, Future[Share]] = {}
        self._lock = threading.Lock()

    def _future(self, name: str) -> Future[Share]:
        with self._lock:
            return self._futures.setdefault(name, Future())

    def add(self, share: Share) -> None:
        """Makes `share` known, in place of an earlier one."""
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
    def written(self, name: str, stem: str) -> Written | Problem | int:
        """The share's files in the checkpoint `stem` once they are on disk; until then, a number that grows."""
        return self._get(name).written(stem)

    @remote
    def load(self, name: str, stem: str, files: list[ShardFile]) -> Problem | None:
        """Reads the share out of the files of a checkpoint."""
        return self._get(name).load(stem, files)

    # ---- files: these raise ShardError

    def _folder(self, stem: str) -> Path:
        if not rundir.NAME.fullmatch(f"{stem}.pt"):
            raise ShardError(f"{stem} is no checkpoint's name")
        return self.directory / stem

    @remote
    def read_piece(self, stem: str, file: str, place: int, length: int) -> Tensor:
        """Bytes of a file of the checkpoint `stem`."""
        return shardfile.read_piece(self._folder(stem) / Path(file).name, place, length)

    @remote
    def write_piece(self, stem: str, file: str, place: int, data: Tensor) -> None:
        """Writes bytes of a file of the checkpoint `stem`, which begins anew at place 0."""
        shardfile.write_piece(self._folder(stem) / Path(file).name, place, data)

    @remote
    def sync(self, stem: str, files: list[str]) -> None:
        """Has the `files` of the checkpoint `stem`, and all names in its folder, on disk."""
        shardfile.sync(self._folder(stem), [Path(file).name for file in files])

    @remote
    def link(self, stem: str, earlier: str, file: str) -> None:
        """Makes `file` of the checkpoint `earlier` a part of the checkpoint `stem`, too."""
        name = Path(file).name
        shardfile.share(self._folder(earlier) / name, self._folder(stem) / name)
