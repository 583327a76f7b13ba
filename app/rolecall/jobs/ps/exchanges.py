"""What a trainer does in each mode: it shares the cores, sends parts of gradients up, and takes parameters down."""

from __future__ import annotations

import ipaddress
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from rolecall import Context, Peer, PeerLostError
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import Assignment, BatchReport, GradientKey, GradientPart, PartAnswer, TrainerId
from rolecall.jobs.ps.metrics import WEIGHTS
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.wire import Receiver, Sender

Exchange = Future[Future[PartAnswer]]  # of one part of a gradient: it is on its way, then its answer is


def share_cores(context: Context[PsSettings]) -> None:
    """Sets torch's threads to this trainer's share of the cores, if all ranks are on one machine. It is called before
    each batch or round, because the number of trainers changes: with more threads than cores, each step takes many
    times as long. With `sync` the share is that of TRAINERS: the bits of a gradient may depend on the threads.
    """
    s = context.settings
    try:
        one_machine = ipaddress.ip_address(s.master_addr).is_loopback
    except ValueError:  # a name
        one_machine = False
    trainers = s.trainers if s.update_mode == "sync" else len(context.peers("trainer"))
    sharing = 1 if s.threads or not one_machine else max(1, trainers)
    torch.set_num_threads(max(1, context.threads // sharing))


def deadline(settings: PsSettings) -> float:
    """Seconds for an answer: longer than the slowest trainer's batches or round, while the lead waits for each of its
    steps, and saves. With `sync` one trainer may compute all batches, of an update that is made again, too.
    """
    steps = settings.inner_steps if settings.update_mode == "local" else 2 * settings.update_batches
    return (steps + 2) * settings.step_timeout + settings.phase_timeout + settings.rpc_timeout


def is_answered(exchange: Exchange) -> bool:
    """Whether the answer is here."""
    return exchange.done() and exchange.result().done()


class Exchanges:
    """Sends the parts of gradients of `module` in a thread, because a call returns once it is sent: the trainer
    computes meanwhile. `version` is that of the newest parameters here.

    They are of this trainer's part `me` in a generation. After its end nothing is sent: the trainer may still compute a
    gradient of it while it becomes a part of the next generation.
    """

    def __init__(self, context: Context[PsSettings], module: nn.Module) -> None:
        s = context.settings
        self.me, self.version = TrainerId.of(context.me, context.generation), 0
        self.buffers = model.buffers(module)  # the newest that came
        self.parts = model.parts(module, s)
        self.senders = [Sender(part.size, s.wire_dtype) for part in self.parts]
        self._receivers = [Receiver(part.size, s.wire_dtype) for part in self.parts]
        self._context, self._module, self._metrics = context, module, context.metrics
        self._calls = context.options(timeout=deadline(s))
        self._servers = {peer.ordinal: peer for peer in context.peers("ps")}
        self._thread = ThreadPoolExecutor(1)  # in their order

    def send(self, number: int, index: int, gradient: Tensor | None, report: BatchReport) -> Exchange:
        """Sends part `index` [elements] of the gradient `number` to its server; None asks for parameters alone. The
        lead, which has part 0, gets the `report`.
        """
        payload = None
        if gradient is not None:
            payload = self.senders[index].encode(gradient)
            self._metrics.ps_payload_bytes.labels("up").inc(payload.nbytes)
        message = GradientPart(GradientKey(self.me, number), index, payload, report if index == 0 else None)
        return self._thread.submit(self._send, self._servers[self.parts[index].server], message)

    def _send(self, server: Peer, message: GradientPart) -> Future[PartAnswer]:
        if TrainerId.of(self._context.me, self._context.generation) != self.me:
            raise PeerLostError(f"generation {self.me.generation} has ended for {self.me.name}")
        return self._calls.call(server, Server.exchange, message)

    def take(self, index: int, exchange: Exchange) -> tuple[Tensor | None, Assignment | None]:
        """Waits for the answer to part `index`: its new parameters [elements], None if the trainer has them already,
        and with part 0 the assignment, whose buffers the module gets.
        """
        with self._metrics.ps_wait_seconds.time():
            payload, assignment = exchange.result().result()
        if assignment is not None:
            self.version = assignment.version
            self._metrics.weights_version.labels(WEIGHTS).set(self.version)
            self.buffers = assignment.buffers or self.buffers
            model.load_buffers(self._module, assignment.buffers)
        if payload is None:
            return None, assignment
        self._metrics.ps_payload_bytes.labels("down").inc(payload.nbytes)
        self._metrics.weights_bytes.labels(WEIGHTS).inc(payload.nbytes)
        saved = 4 * self.parts[index].size - payload.nbytes
        self._metrics.weights_saved_bytes.labels(WEIGHTS).inc(max(0, saved))  # a tiny part is padded to a block
        return self._receivers[index].receive(payload), assignment

    def close(self) -> None:
        """Ends the thread. What is not sent yet stays unsent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
