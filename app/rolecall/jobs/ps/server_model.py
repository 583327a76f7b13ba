"""UPDATE_MODE=autograd: the model at the lead, which trainers run forward and backward through.

In the tutorial a second trainer's step changes parameters in place between another's forward and backward pass, and
autograd refuses. Here a version of the parameters is never changed: an update makes another one, and each trainer's
pass runs, forward and backward, through a replica of the model over the version that it began with. Replicas share that
memory; what they add is the staleness of `async`, counted and bounded in the same way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, model


@dataclass(frozen=True)
class _Pass:
    """Whose forward pass it is, and the version of the parameters that it runs through."""

    trainer: str
    version: int


class ServerModel:
    """The server's model, for any number of trainers at once. Lives behind an RRef."""

    def __init__(self, settings: PsSettings, threads: int) -> None:
        """`threads` are torch's, of one pass. Raises UsageError where there are fewer than NUM_GPUS GPUs."""
        if settings.num_gpus > torch.cuda.device_count():
            raise UsageError(f"NUM_GPUS={settings.num_gpus}: torch finds {torch.cuda.device_count()} CUDA devices here")
        self._settings, self._threads = settings, threads
        self._devices = tuple(torch.device("cuda", number) for number in range(settings.num_gpus))
        self._lock = threading.Lock()
        self._replicas: dict[str, nn.Module] = {}  # by trainer
        self._passes: dict[int, _Pass] = {}  # by context_id
        self._version, self._flat = 0, torch.empty(0)

    def publish(self, version: int, flat: Tensor) -> None:
        """From now on passes begin with the parameters `flat` [total], which nobody may change."""
        with self._lock:
            self._version, self._flat = version, flat

    def forward(self, trainer: str, context_id: int, inputs: Tensor) -> Tensor:
        """The model's output [n, classes], on the device of `inputs` [n, ...], for a pass of `trainer` in the autograd
        context `context_id`.
        """
        torch.set_num_threads(self._threads)  # of this thread of RPC's
        with self._lock:
            replica = self._replicas.get(trainer)
            if replica is None:
                replica = self._replicas[trainer] = model.build(self._settings, self._devices).train()
            for parameter, view in model.views(self._flat, replica):
                parameter.data = view.to(parameter.device)
            self._passes[context_id] = _Pass(trainer, self._version)
        output: Tensor = replica(inputs)
        return output.to(inputs.device)

    def gradient(self, context_id: int) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """The gradient [total] that the pass in `context_id` left here, the version that it ran through, and the
        model's buffers after it.
        """
        with self._lock:
            ended = self._passes.pop(context_id)
            replica = self._replicas[ended.trainer]
        gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        parts = [gradients.get(one, torch.zeros_like(one)).reshape(-1).cpu() for one in model.trainable(replica)]
        return torch.cat(parts), ended.version, model.buffers(replica)

    def drop(self, trainer: str) -> None:
        """Drops what a lost trainer left."""
        with self._lock:
            self._replicas.pop(trainer, None)
            self._passes = {number: one for number, one in self._passes.items() if one.trainer != trainer}
