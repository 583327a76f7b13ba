"""The tables of all servers as one value of the master."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.nn.api.remote_module import RemoteModule

from rolecall import Context, Sharded
from rolecall.jobs.hybrid import HybridSettings, calls


class ShardedTable(Sharded):
    """The whole table and the state of its optimizer."""

    def __init__(self, context: Context[HybridSettings]) -> None:
        """Builds the table at the servers, without values."""
        super().__init__(context, "embeddings", "ps")
        self._servers = context.peers("ps")
        build: Any = calls.build_table
        devices = dict(context.call_each("ps", calls.device))
        self._tables = [RemoteModule(f"{peer.name}/{devices[peer]}", build) for peer in self._servers]
        for table in self._tables:
            table.remote_parameters()  # waits until the table is built

    def start(self, step: int) -> list[torch.futures.Future[Any]]:
        """Starts training after `step` steps; a table that was not restored gets its initial values. Returns the
        answers of the servers.
        """
        timeout = self.context.settings.phase_timeout  # filling a table on disk takes long
        return [
            self.context.call(server, calls.start_training, step, not self.restored, timeout=timeout)
            for server in self._servers
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the whole table of a checkpoint of an earlier version."""
        if state:
            squares = {"squares": state["squares"]} if len(state["squares"]) else {}
            self.load_whole({"weight": torch.cat(state["weight"]), **squares})
