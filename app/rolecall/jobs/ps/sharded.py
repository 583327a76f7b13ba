"""The servers' shards as one model, at the lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Sharded
from rolecall.jobs.ps import PsSettings, calls
from rolecall.jobs.ps.messages import Assignment, GradientKey, UpdateShard
from rolecall.jobs.ps.server import Server


class ShardedModel(Sharded):
    """The parameters and the optimizer's state on all servers, and the model's `buffers`.

    Used from one thread, so nothing is read while an update is made.
    """

    def __init__(self, context: Context[PsSettings], server: Server) -> None:
        super().__init__(context, "model", "ps")
        self.server = server
        self.others = [peer for peer in context.peers("ps") if peer != context.me]
        self.buffers: tuple[Tensor, ...] = ()
        self._lost: list[str] = []  # trainers that the other servers have yet to drop

    def update(self, order: UpdateShard, assignments: Mapping[GradientKey, Assignment]) -> None:
        """Has every server apply an update and answer; returns once all have."""
        order, self._lost = replace(order, lost=tuple(self._lost)), []
        deadline = self.context.settings.step_timeout  # many gradients and views take longer than a short call
        answers = [self.context.call(peer, calls.update, order, timeout=deadline) for peer in self.others]
        self.server.update(order, assignments)
        self.context.wait_all(answers)

    def drop(self, trainer: str) -> None:
        """Drops what a lost trainer left; the other servers do with the next update."""
        self.server.drop(trainer)
        self._lost.append(trainer)

    def parameters(self) -> Tensor:
        """All parameters [total]."""
        answers, flat = self._call(calls.flat), torch.empty(self.server.total)
        begin = 0
        for part in (self.server.shard.flat, *self.context.wait_all(answers)):
            flat[begin : begin + len(part)] = part
            begin += len(part)
        return flat

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has beside the servers' shards."""
        return {"buffers": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, which of an earlier version is the whole model's. Raises UsageError where that is
        another one, or of another OPTIMIZER.
        """
        if "parameters" in state:
            optimizer = {name: value.reshape(-1) for name, value in state["optimizer"].items()}
            self.load_whole({"parameters": state["parameters"], **optimizer})
        self.buffers = tuple(state["buffers"])

    def _call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [self.context.call(peer, function, *args) for peer in self.others]
