"""What a job's function is given: who it is, whom it works with, and the few things that it may ask or say."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolecall import telemetry
from rolecall.config import Settings, UsageError
from rolecall.job.checkpoint import CheckpointError, Checkpoints

if TYPE_CHECKING:
    import torch


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, and no more than a container's limit allows (cgroup v2 or v1)."""
    found = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # not this version, or no limit ("max")
            quota, period = (int(word) for file in files for word in (cgroup / file).read_text().split())
            if quota > 0:
                found = min(found, math.ceil(quota / period))
    return found


@dataclass(frozen=True)
class Peer:
    """A member of a generation; `name` is its RPC worker name."""

    role: str
    ordinal: int
    rank: int

    @property
    def name(self) -> str:
        return f"{self.role}_{self.ordinal}"


@dataclass(frozen=True)
class Outcome:
    """How rank 0's function ended: the job is `finished` (with a summary), or it `drained` after step `step`."""

    kind: str
    step: int
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a worker is started with; `members` are in order of rank, and empty for a check of the settings."""

    job: str
    settings: Settings
    me: Peer
    members: tuple[Peer, ...] = ()
    generation: int = 0
    lost: tuple[str, ...] = ()


@dataclass
class Context:
    """A rank's view of its generation.

    Rank 0's function returns an `Outcome`; the others' functions serve until the process is ended. `report(step)` is
    the progress that decides over failures; a rank 0 looks at `draining` between two steps. `note(kind, step, value)`,
    of rank 0, goes to the run's history: `train` when training begins, the curve's `score`, the training `loss`, the
    `goal`, and what is `done`, all in all, of the unit that the job's rate counts.
    """

    settings: Settings
    me: Peer
    members: tuple[Peer, ...]
    generation: int
    metrics: Any
    checkpoints: Checkpoints | None = None
    report: Callable[[int], None] = lambda step: None
    note: Callable[[str, int, float], None] = lambda kind, step, value: None
    tell_lost: Callable[[Peer], None] = lambda peer: None
    refuse_drain: Callable[[str], None] = lambda why: None
    lost: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)  # peers that CUDA tensors can be sent to
    _drain: threading.Event = field(default_factory=threading.Event)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    def peers(self, role: str) -> list[Peer]:
        """The generation's members with `role`, by ordinal, without those that were lost."""
        return [peer for peer in self.members if peer.role == role and peer.name not in self.lost]

    @property
    def draining(self) -> bool:
        """Whether the job is to stop after the step in hand and write a checkpoint."""
        return self._drain.is_set()

    def drain(self) -> None:
        self._drain.set()

    def save(self, step: int, state: dict[str, Any], drain: bool = False) -> bool:
        """Write rank 0's checkpoint of `step`. Where that fails, say so, and that the job trains on: `drain` says that
        the checkpoint is a drain's, which is then given up.
        """
        assert self.checkpoints is not None
        log = telemetry.log()
        try:
            with telemetry.Timer() as timer:
                path = self.checkpoints.write(step, state)
        except CheckpointError as error:
            self.metrics.checkpoint_failures.inc()
            log.error("no checkpoint written; training goes on", problem=str(error))
            if drain:
                self._drain.clear()
                self.refuse_drain(str(error))
            return False
        self.metrics.checkpoint_seconds.observe(timer.seconds)
        self.metrics.checkpoint_timestamp_seconds.set_to_current_time()
        log.info("checkpoint", file=path.name, seconds=round(timer.seconds, 3))
        return True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Training stands still meanwhile, and is not to be taken for stuck."""
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

    def lose(self, name: str) -> None:
        """`name` is no longer part of this generation: its calls are refused, calls to it are given up."""
        if name in self.lost:
            return
        self.lost.add(name)
        for listener in self._listeners:
            listener(name)

    def give_up(self, name: str) -> None:
        """Rank 0 found `name` dead or silent: lose it here, and have the gang replace its worker."""
        if name not in self.lost:
            self.lose(name)
            self.tell_lost(next(peer for peer in self.members if peer.name == name))

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Call `listener(name)` for every peer that is lost from now on, from another thread."""
        self._listeners.append(listener)

    def wait_draining(self, timeout: float) -> bool:
        """Wait until a drain is ordered; False after `timeout` seconds."""
        return self._drain.wait(timeout)

    @property
    def threads(self) -> int:
        """Threads for a large computation. Single operations have one here: splitting them stalls on a busy machine."""
        return self.settings.threads or cores()

    @property
    def device(self) -> torch.device:
        """Where this rank computes. Raises UsageError for DEVICE=cuda where there is none."""
        import torch

        wanted = self.settings.device
        if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UsageError("DEVICE=cuda: torch finds no CUDA device here; use DEVICE=auto or cpu")
        return torch.device("cuda")
