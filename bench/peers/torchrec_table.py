"""A large table that TorchRec keeps in one process (table-wise), with a dense network under DistributedDataParallel."""

from __future__ import annotations

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingType

from bench.bags import CLASSES, INDICES, LEARNING_RATE, TRAINERS, WIDTH
from bench.peers import tables

DEVICE = torch.device("cpu")


class Model(nn.Module):
    """The table and one linear layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        config = torchrec.EmbeddingBagConfig(
            name="table", embedding_dim=WIDTH, num_embeddings=rows, feature_names=["bag"]
        )
        self.bags = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.dense = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: torchrec.KeyedJaggedTensor) -> Tensor:
        """Logits [bags, CLASSES]."""
        logits: Tensor = self.dense(self.bags(features).values())
        return logits


def build(rows: int) -> tables.Step:
    """A step: the processes exchange indices, pooled vectors and their gradients; the table's optimizer is fused."""
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    model = Model(rows)
    constraints = {"table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])}
    planner = EmbeddingShardingPlanner(topology=Topology(TRAINERS, "cpu"), constraints=constraints)
    group = torch.distributed.group.WORLD
    plan = planner.collective_plan(model, [sharder], group)
    env = ShardingEnv.from_process_group(group)
    parallel = torchrec.distributed.DistributedModelParallel(model, env, DEVICE, plan=plan, sharders=[sharder])
    optimizer = torch.optim.SGD(parallel.module.dense.parameters(), LEARNING_RATE)

    def step(indices: Tensor, labels: Tensor) -> None:
        lengths = torch.full((len(indices),), INDICES, dtype=torch.int32)
        features = torchrec.KeyedJaggedTensor(["bag"], indices.reshape(-1), lengths=lengths)
        optimizer.zero_grad()
        functional.cross_entropy(parallel(features), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    tables.main(__doc__, build)
