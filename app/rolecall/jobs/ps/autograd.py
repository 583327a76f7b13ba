"""UPDATE_MODE=autograd: the tutorial's way. The model is on the server; trainers run forward through it, distributed
autograd runs backward through both, and the server steps the one optimizer there is.

In the tutorial a second trainer's step changes parameters in place between another's forward and backward pass, and
autograd refuses. Here a version of the parameters is never changed: an update makes another one, and each trainer's
pass runs, forward and backward, through a replica of the model over the version that it began with. Replicas share that
memory; what they add is the staleness of `async`, counted and bounded in the same way.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall.config import UsageError
from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.ps import PsSettings, data, model, server
from rolecall.jobs.ps.server import Arrival, Order, Report


class Tower:
    """The server's model, for any number of trainers at once. Lives behind an RRef."""

    def __init__(self, settings: PsSettings, threads: int) -> None:
        if settings.num_gpus > torch.cuda.device_count():
            raise UsageError(f"NUM_GPUS={settings.num_gpus}: torch finds {torch.cuda.device_count()} CUDA devices here")
        self._settings, self._threads = settings, threads
        self._devices = tuple(torch.device("cuda", number) for number in range(settings.num_gpus))
        self._lock = threading.Lock()
        self._replicas: dict[str, nn.Module] = {}
        self._passes: dict[
            int, tuple[str, int]
        ] = {}  # by context_id: whose it is, and the version that it runs through
        self._version, self._flat = 0, torch.empty(0)

    def publish(self, version: int, flat: Tensor) -> None:
        """From now on passes begin with `flat` [total], which nobody may change."""
        with self._lock:
            self._version, self._flat = version, flat

    def forward(self, trainer: str, context_id: int, inputs: Tensor) -> Tensor:
        """The model's output, where the inputs are, for a pass of `trainer` in the autograd context `context_id`."""
        torch.set_num_threads(self._threads)  # of this thread of RPC's
        with self._lock:
            replica = self._replicas.get(trainer)
            if replica is None:
                replica = self._replicas[trainer] = model.build(self._settings, self._devices).train()
            for parameter, view in model.views(self._flat, replica):
                parameter.data = view.to(parameter.device)
            self._passes[context_id] = trainer, self._version
        output: Tensor = replica(inputs)
        return output.to(inputs.device)

    def gradient(self, context_id: int) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """The gradient [total] that the pass in `context_id` left here, its version, and the model's buffers after it."""
        with self._lock:
            trainer, version = self._passes.pop(context_id)
            replica = self._replicas[trainer]
        found: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        made = [found.get(one, torch.zeros_like(one)) for one in model.trainable(replica)]
        return torch.cat([part.reshape(-1).cpu() for part in made]), version, model.buffers(replica)

    def drop(self, trainer: str) -> None:
        """Forget a lost trainer."""
        with self._lock:
            self._replicas.pop(trainer, None)
            self._passes = {context_id: found for context_id, found in self._passes.items() if found[0] != trainer}


# ---- called by trainers at the lead


def tower() -> Tower:
    """The server's model; `rpc.remote` makes an RRef of it."""
    found = server.here().tower
    assert found is not None
    return found


def forward(model: rpc.RRef[Tower], trainer: str, context_id: int, inputs: Tensor) -> Tensor:
    """Run forward through the server's model: inputs [n, ...] to outputs [n, classes]."""
    output: Tensor = model.local_value().forward(trainer, context_id, inputs)
    return output


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def step(
    model: rpc.RRef[Tower], trainer: str, stage: int, context_id: int, report: Report
) -> torch.futures.Future[tuple[None, Order]]:
    """Hand the gradient that `context_id` holds here to the server's optimizer; answered with the next order."""
    gradient, version, buffers = model.local_value().gradient(context_id)
    answer: torch.futures.Future[Any] = torch.futures.Future()
    told = Report(version, report.samples, report.loss, report.correct, buffers)
    server.here().inbox.put(Arrival((trainer, stage), 0, gradient, told, answer))
    return answer


# ---- the trainer


def train(context: Context) -> None:
    """Compute one batch after another through the lead's model, until the epochs are done."""
    settings, metrics, me = context.settings, context.metrics, context.me.name
    assert isinstance(settings, PsSettings)
    train_data, _ = data.load(settings)
    lead = context.members[0].name
    deadline = 2 * settings.step_timeout + settings.rpc_timeout
    remote = rpc.remote(lead, tower, timeout=settings.connect_timeout)
    device = context.device if lead in context.mapped else torch.device("cpu")
    stage = 0
    _, order = rolecall_rpc.call(lead, server.exchange, me, stage, 0, None, Report(0, 0), timeout=deadline).wait()
    while order.batches:
        for batch in order.batches:
            stage += 1
            inputs, targets = train_data.batch(torch.from_numpy(batch))
            with dist_autograd.context() as context_id:
                with metrics.ps_compute_seconds.time():
                    call = rolecall_rpc.call(lead, forward, remote, me, context_id, inputs.to(device), timeout=deadline)
                    output = call.wait()
                    mean = model.loss(output, targets.to(device))
                    dist_autograd.backward(context_id, [mean])  # type: ignore[attr-defined]
                report = Report(0, len(batch), float(mean.detach()), int((output.argmax(1).cpu() == targets).sum()))
                with metrics.ps_wait_seconds.time():
                    answer = rolecall_rpc.call(lead, step, remote, me, stage, context_id, report, timeout=deadline)
                    _, order = answer.wait()
            metrics.ps_computed_samples.inc(len(batch))
            context.report(stage)
