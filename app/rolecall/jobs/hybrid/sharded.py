"""The tables of all servers as one value of the master."""

from __future__ import annotations

from concurrent.futures import Future

from rolecall import Context, Sharded
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.server import TableServer


class ShardedTable(Sharded):
    """The whole table and the state of its optimizer."""

    def __init__(self, context: Context[HybridSettings]) -> None:
        super().__init__(context, "embeddings", "ps")
        # filling a table on disk takes long
        self._calls = context.options(timeout=context.settings.phase_timeout)

    def start(self, step: int) -> list[Future[None]]:
        """Starts training after `step` steps; a table that was not restored gets its initial values. Returns the
        answers of the servers.
        """
        servers = self.context.peers("ps")
        return [self._calls.call(server, TableServer.start, step, fill=not self.restored) for server in servers]
