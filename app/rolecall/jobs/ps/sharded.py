"""The servers' shards as one model, at the lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, model
from rolecall.jobs.ps.messages import Assignment, GradientKey, UpdateShard
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.shard import join_states, require_same_model


class ShardedModel:
    """The parameters and the optimizer's state on all servers, and the model's `buffers`. Stateful.

    Used from one thread, so nothing is read while an update is made.
    """

    def __init__(self, context: Context[PsSettings], server: Server) -> None:
        self.context, self.server, self.settings = context, server, context.settings
        self.others = [peer for peer in context.peers("ps") if peer != context.me]
        self.size = sum(parameter.numel() for parameter in model.trainable(server.module))
        self.buffers: tuple[Tensor, ...] = ()

    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Has every server apply an update and answer; returns once all have."""
        answers = self._call(calls.update, order)
        self.server.update(order, assignments)
        self.context.wait_all(answers)

    def parameters(self) -> Tensor:
        """All parameters [total]."""
        return torch.cat([self.server.shard.flat, *self.context.wait_all(self._call(calls.flat))])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; the same for any number of servers."""
        others = self.context.wait_all(self._call(calls.optimizer_state))
        optimizer = join_states([self.server.shard.optimizer_state(), *others])
        return {"parameters": self.parameters(), "optimizer": optimizer, "buffers": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, at every server. Raises UsageError where it is of another model or OPTIMIZER."""
        flat, optimizer = state["parameters"], state["optimizer"]
        require_same_model(flat, optimizer, self.settings, self.size)
        answers = self._call(calls.restore, flat, optimizer)
        self.server.shard.load(flat, optimizer)
        self.context.wait_all(answers)
        self.buffers = tuple(state["buffers"])

    def _call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [self.context.call(peer, function, *args) for peer in self.others]
