"""UPDATE_MODE=autograd: the model at the lead, through which trainers run forward and backward.

In the tutorial a second trainer's step changes parameters in place between another's forward and backward pass, which
autograd refuses. Here an update never changes parameters but makes a new version of them. Each pass runs, forward and
backward, through a replica of the model over the version that it began with. Replicas share the memory of a version.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import TrainerId


class ServerModel:
    """The lead's model on `device`, for any number of trainers at once, each of which makes a pass after the other."""

    def __init__(self, settings: PsSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._lock = threading.Lock()
        self._replicas: dict[TrainerId, nn.Module] = {}
        self._versions: dict[TrainerId, int] = {}  # of the parameters that the trainer's pass began with
        self._version, self._flat = 0, torch.empty(0)

    def publish(self, version: int, flat: Tensor) -> None:
        """The next passes begin with the parameters `flat` [total], which must not change."""
        with self._lock:
            self._version, self._flat = version, flat

    def forward(self, trainer: TrainerId, inputs: Tensor) -> Tensor:
        """The model's output [n, classes], for the next pass of `trainer` with `inputs` [n, ...]."""
        with self._lock:
            replica = self._replicas.get(trainer)
            if replica is None:
                replica = self._replicas[trainer] = model.build(self._settings).to(self._device).train()
            vector_to_parameters(self._flat.to(self._device), model.trainable(replica))
            self._versions[trainer] = self._version
        output: Tensor = replica(inputs.to(self._device))
        return output

    def gradient(
        self, trainer: TrainerId, gradients: Mapping[Tensor, Tensor]
    ) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """The gradient [total] of the trainer's pass, by parameter in `gradients`, the version of the pass's
        parameters, and the model's buffers after it."""
        with self._lock:
            replica, version = self._replicas[trainer], self._versions[trainer]
        parts = [gradients.get(one, torch.zeros_like(one)).reshape(-1).cpu() for one in model.trainable(replica)]
        return torch.cat(parts), version, model.buffers(replica)

    def drop(self, trainer: TrainerId) -> None:
        """Drops the replica of a lost trainer."""
        with self._lock:
            self._replicas.pop(trainer, None)
            self._versions.pop(trainer, None)
