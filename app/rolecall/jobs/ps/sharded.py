"""The servers' shards as one model, at the lead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Sharded
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import Assignment, GradientKey, TrainerId, UpdateShard
from rolecall.jobs.ps.server import Server


class ShardedModel(Sharded):
    """The parameters and the optimizer's state on all servers, and the model's `buffers`.

    One thread uses it, so nothing is read during an update.
    """

    def __init__(self, context: Context[PsSettings], server: Server) -> None:
        super().__init__(context, "model", "ps")
        self._step_timeout = context.settings.step_timeout
        self.server = server
        self.others = [peer for peer in context.peers("ps") if peer != context.me]
        self.buffers: tuple[Tensor, ...] = ()
        self._lost: list[TrainerId] = []  # trainers that the other servers have yet to drop

    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Has every server apply an update and answer; returns once all have."""
        order, self._lost = replace(order, lost=tuple(self._lost)), []
        calls = self.context.options(timeout=self._step_timeout)  # many gradients take longer than RPC_TIMEOUT
        answers = [calls.call(peer, Server.update, order, {}) for peer in self.others]
        self.server.update(order, assignments)
        self.context.wait_all(answers)

    def drop(self, trainer: TrainerId) -> None:
        """Drops what a lost trainer sent; the other servers do so with the next update."""
        self.server.drop(trainer)
        self._lost.append(trainer)

    def parameters(self) -> Tensor:
        """All parameters [total]."""
        answers = [self.context.call(peer, Server.flat) for peer in self.others]
        return torch.cat([self.server.shard.flat, *self.context.wait_all(answers)])

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint beside the servers' shards."""
        return {"buffers": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self.buffers = tuple(state["buffers"])
