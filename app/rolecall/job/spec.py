"""What the author of a job declares: its roles, its settings, its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rolecall.config import Settings
from rolecall.telemetry import Metric


@dataclass(frozen=True)
class Role:
    """One role of a job. The first role's member 0 is rank 0, which coordinates and writes checkpoints.

    `run` is a `module:function` that is called with a `Context`. The counts name settings: a start waits for `count`
    members; `minimum` and `maximum` bound an elastic role, whose members may join and leave while the job trains.
    `preload` lists slow modules to import once, before workers are forked.
    """

    name: str
    run: str
    count: str = ""
    minimum: str = ""
    maximum: str = ""
    preload: tuple[str, ...] = ()

    @property
    def elastic(self) -> bool:
        """Whether members may join and leave while the job trains."""
        return bool(self.minimum)


@dataclass(frozen=True)
class Job:
    """A topology: its settings, its roles, and where its functions are.

    `check` is called with the settings before a rank joins, and raises UsageError for what can never work.
    `evaluate` is called with the settings and a checkpoint's state by `rolecall eval JOB`; `complete`, of a job whose
    model writes text, is called with a prompt too. `pinned` names the settings that a checkpoint depends on: they are
    saved with it, must be the same on resume, and are restored for `evaluate`.

    `score` labels the curve that `Context.log` draws, of which lower is better where `lower` is set; `unit` is what
    its `done` counts. Without `rpc`, workers do not call `init_rpc`: they share only `Context.store`.
    """

    summary: str
    settings: type[Settings]
    roles: tuple[Role, ...]
    check: str
    evaluate: str
    score: str
    unit: str
    metrics: tuple[Metric, ...] = ()
    lower: bool = False
    complete: str = ""
    pinned: tuple[str, ...] = ()
    rpc: bool = True
