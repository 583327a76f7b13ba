"""`rolecall export hybrid`: the table of all servers and the dense network, as one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rolecall import Exported
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid.data import EVALUATION_BATCH, Samples
from rolecall.jobs.hybrid.evaluate import restore, samples_of
from rolecall.jobs.hybrid.hashed import HashedTable
from rolecall.jobs.hybrid.model import LocalModel
from rolecall.jobs.hybrid.table import Bags

LICENCE = "PSF-2.0 (the source of the Python standard library)"


class ExportedTable(nn.Module):
    """A hashed table: a vector for each id, 0 for one without a row."""

    ids: Tensor

    def __init__(self, table: HashedTable) -> None:
        super().__init__()
        ids, rows = table.entries()
        if not len(ids):  # there is always a row to compare with
            ids, rows = ids.new_zeros(1), rows.new_zeros(1, table.settings.embedding_dim)
        self.register_buffer("ids", ids)
        self.rows = nn.Embedding.from_pretrained(rows, freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [n] int64 to vectors [n, width], by a binary search: ONNX has none, and no hash table of arrays."""
        place = torch.zeros_like(ids)
        for bit in reversed(range(len(self.ids).bit_length())):
            further = place + 2**bit
            place = torch.where(self.ids[(further - 1).clamp(max=len(self.ids) - 1)] <= ids, further, place)
            place = place.clamp(max=len(self.ids))
        place = (place - 1).clamp(min=0)
        vectors: Tensor = self.rows(place) * (self.ids[place] == ids)[:, None]
        return vectors


class ExportedModel(nn.Module):
    """Bags of rows, or of ids, to logits; without the optimizer's state."""

    def __init__(self, model: LocalModel) -> None:
        super().__init__()
        self.table: nn.Module
        if isinstance(model.table, HashedTable):
            self.table = ExportedTable(model.table)
        else:
            self.table = nn.Embedding.from_pretrained(model.table.weight.detach(), freeze=False)
        self.dense = model.dense

    def forward(self, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        """Row numbers or ids [rows] int64, the place in it at which each bag begins, offsets [bags] int64, and the
        weight of each [rows], to logits [bags, classes].
        """
        # embedding_bag is a loop over the bags in ONNX; the number of each row's bag is that of the offsets up to it
        begun = rows.new_zeros(rows.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
        bags = begun.cumsum(0)[:-1] - 1
        vectors = self.table(rows) * weights[:, None]
        pooled = vectors.new_zeros(offsets.shape[0], vectors.shape[1]).index_add(0, bags, vectors)
        logits: Tensor = self.dense(pooled)
        return logits


def export(settings: HybridSettings, state: dict[str, Any]) -> Exported:
    """See `ExportedModel`. Raises UsageError as `evaluate` does."""
    model, samples = restore(settings, state), samples_of(settings, state)

    def reference(rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        ends = torch.cat([offsets, offsets.new_tensor([len(rows)])])
        logits: Tensor = model(Bags(rows, ends, weights))
        return logits

    def batches() -> Iterator[dict[str, Tensor]]:
        for numbers in (torch.zeros(1, dtype=torch.int64), *torch.arange(len(samples.test)).split(EVALUATION_BATCH)):
            yield _inputs(samples.test.take(numbers))

    example = {
        "rows": torch.arange(4) % settings.num_embeddings,
        "offsets": torch.tensor([0, 1, 3]),
        "weights": torch.tensor([1.0, 0.5, 0.5, 1.0]),
    }
    return Exported(
        ExportedModel(model),
        example,
        ["logits"],
        dynamic={"rows": {0: "rows"}, "offsets": {0: "bags"}, "weights": {0: "rows"}},
        data=batches,
        reference=reference,
        licence=LICENCE if settings.dataset == "stdlib" else "",
    )


def _inputs(samples: Samples) -> dict[str, Tensor]:
    bags = samples.bags
    weights = torch.ones(len(bags.rows)) if bags.weights is None else bags.weights
    return {"rows": bags.rows, "offsets": bags.offsets[:-1], "weights": weights}
