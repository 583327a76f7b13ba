"""UPDATE_MODE=autograd: the model at the lead, through which trainers run forward and backward.

In the tutorial a second trainer's step changes parameters in place between another's forward and backward pass, which
autograd refuses. Here an update never changes parameters but makes a new version of them. Each pass runs, forward and
backward, through a replica of the model over the version that it began with. Replicas share the memory of a version.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import TrainerId


class ServerModel:
    """The lead's model on `device`, for any number of trainers at once. A pass has `threads` torch threads. Trainers
    use it through an RRef.
    """

    def __init__(self, settings: PsSettings, threads: int, device: torch.device) -> None:
        self._settings, self._threads, self._device = settings, threads, device
        self._lock = threading.Lock()
        self._replicas: dict[TrainerId, nn.Module] = {}
        # by context_id, the trainer of a forward pass and the version of its parameters
        self._passes: dict[int, tuple[TrainerId, int]] = {}
        self._version, self._flat = 0, torch.empty(0)

    def publish(self, version: int, flat: Tensor) -> None:
        """The next passes begin with the parameters `flat` [total], which must not change."""
        with self._lock:
            self._version, self._flat = version, flat

    def forward(self, trainer: TrainerId, context_id: int, inputs: Tensor) -> Tensor:
        """The model's output [n, classes], on the device of `inputs` [n, ...], for a pass of `trainer` in the autograd
        context `context_id`.
        """
        torch.set_num_threads(self._threads)  # of this RPC thread
        with self._lock:
            replica = self._replicas.get(trainer)
            if replica is None:
                replica = self._replicas[trainer] = model.build(self._settings).to(self._device).train()
            vector_to_parameters(self._flat.to(self._device), model.trainable(replica))
            self._passes[context_id] = trainer, self._version
        output: Tensor = replica(inputs.to(self._device))
        return output.to(inputs.device)

    def gradient(self, context_id: int) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """The gradient [total] of the pass in `context_id`, the version of its parameters, and the model's buffers
        after it.
        """
        with self._lock:
            trainer, version = self._passes.pop(context_id)
            replica = self._replicas[trainer]
        gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        parts = [gradients.get(one, torch.zeros_like(one)).reshape(-1).cpu() for one in model.trainable(replica)]
        return torch.cat(parts), version, model.buffers(replica)

    def drop(self, trainer: TrainerId) -> None:
        """Drops the replica and the passes of a lost trainer."""
        with self._lock:
            self._replicas.pop(trainer, None)
            self._passes = {number: one for number, one in self._passes.items() if one[0] != trainer}
