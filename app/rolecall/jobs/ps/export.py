"""`rolecall export ps`: the network, with the parameters of all servers' shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rolecall import Exported
from rolecall.jobs.ps import PsSettings, data
from rolecall.jobs.ps.evaluate import CHUNK_SAMPLES, restore

LICENCES = {
    "digits": "CC BY 4.0 (Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998)",
    "mnist": "CC BY-SA 3.0 (MNIST, Yann LeCun and Corinna Cortes)",
}


def export(settings: PsSettings, state: dict[str, Any]) -> Exported:
    """The network from inputs [batch, ...], normalised as those of DATASET, to class logits or log-probabilities
    [batch, classes]. Raises UsageError as `evaluate` does.
    """
    module = restore(settings, state).eval()
    _, test = data.load(settings)
    example, _ = test.batch(torch.arange(2) % len(test))

    def batches() -> Iterator[dict[str, Tensor]]:
        for numbers in (torch.zeros(1, dtype=torch.int64), *torch.arange(len(test)).split(CHUNK_SAMPLES)):
            yield {"inputs": test.batch(numbers)[0]}

    normalised = {"mean": test.mean, "std": test.std} if isinstance(test, data.Images) else {}
    return Exported(
        module,
        {"inputs": example},
        ["scores"],
        {"inputs": {0: "batch"}},
        batches,
        licence=LICENCES.get(settings.dataset, ""),
        extra={"normalisation": normalised} if normalised else {},
    )
