"""What a job's function is given: who it is, whom it works with, and what it may call."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rolecall import telemetry
from rolecall.config import Settings, UsageError
from rolecall.job.checkpoint import CheckpointError, Checkpoints, Snapshot
from rolecall.job.progress import Progress, Supervision
from rolecall.job.spec import Job
from rolecall.job.task import Outcome, Peer, PeerLostError
from rolecall.run import rundir

S = TypeVar("S", bound=Settings)


class Transport(Protocol):
    """How calls reach peers: torch RPC, once connected (`rolecall.job.rpc`)."""

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Any:
        """See `Context.call`."""

    def on_disconnect(self, to: str, gone: Callable[[str], None]) -> None:
        """See `Context.on_disconnect`."""

    def join_group(self, context: Context[Any], role: str, timeout: float) -> None:
        """See `Context.join_group`."""

    def wait_all(self, calls: list[Any]) -> list[Any]:
        """See `Context.wait_all`."""

    def forward(self, context: Context[Any], method: str, *args: Any, **values: Any) -> None:
        """Calls a method of rank 0's `Progress`."""


@dataclass
class Context(Generic[S]):
    """A rank's view of its generation.

    Rank 0's function returns an `Outcome`, made by `finish` or `drained`; the others' functions serve until their
    process is ended. Whatever a function raises is a failure, except for the loss of a peer and bad input (UsageError).
    """

    settings: S
    me: Peer
    members: tuple[Peer, ...]
    generation: int
    metrics: Any
    job: Job | None = None
    checkpoints: Checkpoints | None = None
    supervision: Supervision = field(default_factory=Supervision)
    lost: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)  # peers that CUDA tensors can be sent to
    transport: Transport | None = None
    store: Any = None  # the generation's torch Store, where its workers met
    _drain: threading.Event = field(default_factory=threading.Event)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logger = telemetry.log()
        self.progress = Progress(self.settings, self.metrics, self.supervision, self.job.unit if self.job else "steps")
        self._saved_at = time.monotonic()

    # ---- peers

    def peers(self, role: str) -> list[Peer]:
        """The generation's members with `role`, by ordinal, without those that were lost."""
        return [peer for peer in self.members if peer.role == role and peer.name not in self.lost]

    def call(self, to: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Any:
        """Calls `function(*args)` at the peer `to`. Returns a torch future, which raises RuntimeError where the call
        fails or `timeout` seconds pass (-1: RPC_TIMEOUT). Calls are counted and timed under the function's name.
        """
        return self._connected.call(to, function, *args, timeout=timeout)

    def wait_all(self, calls: list[Any]) -> list[Any]:
        """The answers of calls to peers that this rank cannot do without. Raises PeerLostError."""
        return self._connected.wait_all(calls)

    def on_disconnect(self, to: str, gone: Callable[[str], None]) -> None:
        """Calls `gone(to)`, from another thread, as soon as the peer `to` has ended or its connection broke.

        For a peer that is not called while it works. The gang notices one that falls silent.
        """
        self._connected.on_disconnect(to, gone)

    def join_group(self, role: str, timeout: float) -> None:
        """Makes torch's default process group of the members with `role`, all of which call this. Collectives time
        out after `timeout` seconds. NCCL where each has a GPU of its own, gloo otherwise. Raises PeerLostError.
        """
        self._connected.join_group(self, role, timeout)

    def lose(self, name: str) -> None:
        """Takes `name` out of this generation: its calls are refused, calls to it are given up."""
        if name in self.lost:
            return
        self.lost.add(name)
        for listener in self._listeners:
            listener(name)

    def give_up(self, name: str) -> None:
        """Loses `name`, which rank 0 found dead or silent, and has the gang replace its worker."""
        if name not in self.lost:
            self.lose(name)
            peer = next(peer for peer in self.members if peer.name == name)
            self.supervision.report_lost(peer.role, peer.ordinal)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(name)`, from another thread, for every peer that is lost from now on."""
        self._listeners.append(listener)

    def require_peers(self, role: str) -> None:
        """Raises PeerLostError where no peer with `role` is left, unless a drain is ordered within two leases."""
        # the gang ends such a generation, or drains it
        if not self.peers(role) and not self._drain.wait(2 * self.settings.lease_seconds):
            raise PeerLostError(f"no {role} is left")

    @property
    def _connected(self) -> Transport:
        if self.transport is None:
            raise RuntimeError("this context is not connected to any peer")
        return self.transport

    # ---- progress

    def start(self, step: int, *, done: float = 0, total: float | None = None, goal: float | None = None,
              **facts: Any) -> None:  # fmt: skip
        """Training begins after `step`, with `done` units of work behind it and `total` at its end, towards a score of
        `goal`. `facts` are for the log.
        """
        self._progress("start", step, done=done, total=total, goal=goal, **facts)

    def log(self, step: int, *, done: float | None = None, loss: float | None = None, score: float | None = None,
            epoch: int | None = None, message: str = "", **values: float) -> None:  # fmt: skip
        """Says how training stands after `step`: metrics, the run's history, and a log line every LOG_INTERVAL steps.

        `done` is the work so far, in the job's unit, from which rate and time left follow; `loss` the mean loss over
        the work since the last call; `score` a point of the curve; `epoch` counts from 1. `values` are gauges of the
        job, by their metrics' names. A line begins with `message`, if one is given. Without `done`, `step` may be an
        earlier one, whose score is known only now.
        """
        if done is not None and self.me.rank:  # rank 0's progress does so itself
            self.report_step(step)
        self._progress("log", step, done=done, loss=loss, score=score, epoch=epoch, message=message, **values)

    def report_step(self, step: int) -> None:
        """Tells the supervisor that this rank has made `step`: progress, after which earlier failures do not count."""
        self.supervision.report_step(step)

    def _progress(self, method: str, *args: Any, **values: Any) -> None:
        if self.me.rank == 0:
            getattr(self.progress, method)(*args, **values)
        else:
            self._connected.forward(self, method, *args, **values)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Marks training as paused for an evaluation, so that it is not taken for stuck."""
        self.metrics.evaluating.set(1)
        try:
            yield
        finally:
            self.metrics.evaluating.set(0)

    def require_finite(self, *values: float, hint: str) -> None:
        """Raises FloatingPointError, and counts it, where a loss or the norm of its gradient is not finite."""
        if not all(map(math.isfinite, values)):
            self.metrics.nonfinite_losses.inc()
            raise FloatingPointError(hint)

    # ---- checkpoints, of rank 0

    def restore(self) -> Snapshot | None:
        """The newest checkpoint, or None. Raises UsageError where it was made with other pinned settings, or where
        none of the checkpoints can be read."""
        assert self.checkpoints is not None
        snapshot = self.checkpoints.newest()
        if snapshot is not None:
            snapshot.require_settings(self.settings)
            self.progress.seconds = float(snapshot.state.get("seconds", 0.0))
            self.logger.info("resumed", file=snapshot.path.name, step=snapshot.step)
        return snapshot

    @property
    def files(self) -> Path:
        """The folder for the job's own files, beside the checkpoints. Absolute, and there."""
        path = (self.settings.checkpoint_dir / rundir.FILES).absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def draining(self) -> bool:
        """Whether the job is to stop after the current step and write a checkpoint."""
        return self._drain.is_set()

    def drain(self) -> None:
        """Orders a drain."""
        self._drain.set()

    def await_drain(self) -> None:
        """Returns as soon as a drain is ordered."""
        self._drain.wait()

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due: CHECKPOINT_INTERVAL has passed, or a drain was ordered."""
        return self.draining or time.monotonic() - self._saved_at > self.settings.checkpoint_interval

    def save(self, step: int, state: dict[str, Any], drain: bool | None = None) -> bool:
        """Writes the checkpoint of `step`: `state` (tensors, numbers, strings, lists, dicts), pinned settings and
        seconds of training. Returns whether the job ends with it, because a drain was ordered (`drain`: by default,
        whether one is). Where it cannot be written, training goes on, and the drain is given up.
        """
        ending = self.draining if drain is None else drain
        return self._write(step, state, ending) and ending

    def _write(self, step: int, state: dict[str, Any], drain: bool) -> bool:
        assert self.checkpoints is not None
        self._saved_at = time.monotonic()
        pinned = self.settings.model_dump(include=set(self.job.pinned if self.job else ()))
        try:
            with telemetry.Timer() as timer:
                path = self.checkpoints.write(
                    step, {**state, "settings": pinned, "seconds": self.progress.total_seconds}
                )
        except CheckpointError as error:
            self.metrics.checkpoint_failures.inc()
            self.logger.error("no checkpoint written; training goes on", problem=str(error))
            if drain:
                self._drain.clear()
                self.supervision.refuse_drain(str(error))
            return False
        self.metrics.checkpoint_seconds.observe(timer.seconds)
        self.metrics.checkpoint_timestamp_seconds.set_to_current_time()
        self.logger.info("checkpoint", file=path.name, seconds=round(timer.seconds, 3))
        return True

    def drained(self, step: int) -> Outcome:
        """What rank 0's function returns once `save` says that the job ends."""
        return Outcome("drained", step)

    def finish(self, step: int, state: dict[str, Any], message: str, **summary: Any) -> Outcome:
        """Writes the last checkpoint and logs `message`; what rank 0's function returns at the end of the job. The
        summary gets `seconds` of training and whether the checkpoint was `saved`.
        """
        saved, seconds = self._write(step, state, drain=False), self.progress.total_seconds
        self.logger.info(message, steps=step, seconds=round(seconds, 1))
        return Outcome("finished", step, {**summary, "seconds": seconds, "saved": saved})

    def conclude(self, outcome: Outcome) -> None:
        """Ends this process at once as if rank 0's function had returned `outcome`, from any thread: for a function
        that cannot be made to return.
        """
        self.supervision.conclude(outcome)

    # ---- where it computes

    @property
    def threads(self) -> int:
        """Threads for a large computation. Single operations have one here: splitting them stalls on a busy machine."""
        return self.settings.cpu_threads

    @property
    def device(self) -> Any:
        """The torch.device that this rank computes on. Raises UsageError for DEVICE=cuda where there is none."""
        return choose_device(self.settings.device, "DEVICE")

    @staticmethod
    def timer() -> telemetry.Timer:
        """`with context.timer() as timer: ...` leaves the seconds that passed in `timer.seconds`."""
        return telemetry.Timer()


def choose_device(wanted: str, variable: str) -> Any:
    """The torch.device that `variable` names with auto, cpu or cuda. Raises UsageError for cuda where there is none."""
    import torch  # a supervisor imports this module, and has no torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"{variable}=cuda: torch finds no CUDA device here; use {variable}=auto or cpu")
    return torch.device("cuda")
