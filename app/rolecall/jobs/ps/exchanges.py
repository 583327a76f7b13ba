"""A trainer's calls to the servers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from rolecall import Context, Peer, PeerLostError
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientPart, PartAnswer, TrainerId
from rolecall.jobs.ps.metrics import WEIGHTS
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.server import Server


class Exchange:
    """One part of a gradient on its way, then its answer."""

    def __init__(self, sent: Future[Future[PartAnswer]]) -> None:
        self._sent = sent

    def done(self) -> bool:
        """Whether the answer is here."""
        return self._sent.done() and self._sent.result().done()

    def result(self) -> PartAnswer:
        """Waits for the answer."""
        return self._sent.result().result()


class Exchanges:
    """Sends the parts of gradients in a thread, because a call returns once it is sent: the trainer computes
    meanwhile. The answers have `deadline` seconds.

    They are of this trainer's part `me` in a generation. After its end nothing is sent: the trainer may still compute a
    gradient of it while it becomes a part of the next generation.
    """

    def __init__(self, context: Context[PsSettings], deadline: float) -> None:
        self.me = TrainerId.of(context.me, context.generation)
        self._context, self._calls = context, context.options(timeout=deadline)
        self._servers = {peer.ordinal: peer for peer in context.peers("ps")}
        self._payload_bytes = context.metrics.ps_payload_bytes.labels("up")
        self._sender = ThreadPoolExecutor(1)  # in their order

    def send(self, server: int, message: GradientPart) -> Exchange:
        """Sends a part to the server with this ordinal."""
        if message.gradient is not None:
            self._payload_bytes.inc(message.gradient.nbytes)
        return Exchange(self._sender.submit(self._send, self._servers[server], message))

    def _send(self, server: Peer, message: GradientPart) -> Future[PartAnswer]:
        if TrainerId.of(self._context.me, self._context.generation) != self.me:
            raise PeerLostError(f"generation {self.me.generation} has ended for {self.me.name}")
        return self._calls.call(server, Server.exchange, message)

    def close(self) -> None:
        """Ends the thread. What is not sent yet stays unsent."""
        self._sender.shutdown(wait=False, cancel_futures=True)


def count_parameters(metrics: Any, payload: Tensor, part: Part) -> None:
    """Counts the parameters of `part` that a trainer received as `payload`."""
    received, full = payload.nbytes, 4 * (part.stop - part.start)
    metrics.ps_payload_bytes.labels("down").inc(received)
    metrics.weights_bytes.labels(WEIGHTS).inc(received)
    metrics.weights_saved_bytes.labels(WEIGHTS).inc(max(0, full - received))  # a tiny part is padded to a block
