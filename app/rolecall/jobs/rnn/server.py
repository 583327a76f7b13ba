"""The ps, rank 0: holds the embedding table and the decoder, and writes the checkpoints."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rolecall import Context, Drained, PeerLostError, RankObject
from rolecall.jobs.rnn import RnnSettings, optimizer
from rolecall.jobs.rnn.evaluate import perplexity
from rolecall.jobs.rnn.loss import GradientSums, Pool
from rolecall.jobs.rnn.messages import SaveRequest

CHECK_SECONDS = 0.2  # how often it checks for a silent trainer


def run(context: Context[RnnSettings]) -> dict[str, Any]:
    """Writes the checkpoints that the trainer requests, until the last one or a drain's; RPC's threads serve its other
    calls (`calls`). Raises PeerLostError, and UsageError for a checkpoint of other settings.
    """
    server = SERVER.set(ModelServer(context))
    while True:
        request, answer = server.next_request()
        counters, state = request.trainer.counters, server.checkpoint(request)
        if request.final:
            score = perplexity(counters.history[-1][1])
            message = f"Finished: validation perplexity {score:.2f} after {counters.epoch} epochs"
            summary = context.finish(message, step=counters.step, state=state, perplexity=score, epochs=counters.epoch,
                                     steps=counters.step)  # fmt: skip
            answer.set_result(False)
            return summary
        try:
            context.save(counters.step, state)
        except Drained:
            answer.set_result(False)
            raise
        answer.set_result(True)


class ModelServer:
    """The modules that the trainer builds here, and what its calls need of them."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.inbox: queue.Queue[tuple[SaveRequest, Future[bool]]] = queue.Queue()
        self.modules: dict[str, nn.Module] = {}
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.pool = Pool(context.threads)
        self.turn = threading.Lock()  # one micro-batch after the other: the trainer waits for the first
        self.called_at = math.inf  # when the trainer called last
        self._sums = -1, GradientSums()
        self.snapshot = context.snapshot()

    def next_request(self) -> tuple[SaveRequest, Future[bool]]:
        """The next request for a checkpoint, and where its answer goes: whether to train on. Raises PeerLostError where
        the trainer falls silent.
        """
        while True:
            try:
                return self.inbox.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                silence = time.monotonic() - self.called_at
                if silence > 2 * self.settings.step_timeout + self.settings.rpc_timeout:
                    raise PeerLostError(f"the trainer has not called for {silence:.0f} s") from None

    def checkpoint(self, request: SaveRequest) -> dict[str, Any]:
        """The checkpoint of both ranks."""
        weights = {name: module.state_dict() for name, module in self.modules.items()}
        return request.trainer.checkpoint(weights, optimizer.states(request.optimizers))

    def add_module(self, name: str, module: nn.Module, device: torch.device) -> nn.Module:
        """Moves a module that was just built to its device, with the weights of the checkpoint, if there is one."""
        module.to(device)
        if self.snapshot is not None:
            module.load_state_dict(self.snapshot.state["weights"][name])
        self.modules[name] = module
        return module

    def sums(self, context_id: int) -> GradientSums:
        """Where the micro-batches of a step, which is a distributed autograd context, add their gradients."""
        if self._sums[0] != context_id:
            self._sums = context_id, GradientSums()
        return self._sums[1]

    def outgoing(self, tensor: Tensor) -> Tensor:
        """`tensor` where the trainer expects it: on a GPU only where both ranks compute with one."""
        trainer = self.context.peers("trainer")[0].name
        return tensor.to(self.context.device if trainer in self.context.mapped else "cpu")


SERVER: RankObject[ModelServer] = RankObject()
