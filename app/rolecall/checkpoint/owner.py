"""What a share, and a sharded value, need of the context that they are made with."""

from __future__ import annotations

from typing import Any, Protocol

from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.config import Settings
from rolecall.declare.task import Peer


class Owner(Protocol):
    """A rank of a generation; `Context` is one."""

    logger: Any
    shares: Any  # the `Shares` of this worker
    internal_calls: Any  # the `Calls` of its peers' `Shares`

    @property
    def me(self) -> Peer:
        """This member."""
        ...

    @property
    def generation(self) -> int:
        """The number of the generation."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings that all jobs share."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the generation ends with this step's checkpoint."""
        ...

    def peers(self, role: str) -> list[Peer]:
        """The members with `role`, without those that were lost."""
        ...

    @property
    def call(self) -> Any:
        """See `Context.call`."""
        ...

    @property
    def options(self) -> Any:
        """See `Context.options`."""
        ...

    def wait_all(self, calls: list[Any]) -> list[Any]:
        """The answers of calls; raises the first error."""
        ...

    def require_checkpoints(self) -> Checkpoints:
        """The run's checkpoints. Raises UsageError at another rank than rank 0."""
        ...
