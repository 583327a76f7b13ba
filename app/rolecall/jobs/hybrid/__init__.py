"""A large embedding table on servers, a dense network replicated on trainers by DistributedDataParallel, and a master
that drives both.

After the PyTorch tutorial "Combining Distributed DataParallel with Distributed RPC Framework"; docs/hybrid.md explains
the differences.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rolecall import Epochs, Job, Role, Seconds, Settings
from rolecall.jobs.hybrid.metrics import METRICS


class HybridSettings(Settings):
    """The variables of `hybrid`."""

    servers: int = Field(1, ge=1, le=64, description="servers that the table's rows are sharded over")
    trainers: int = Field(2, ge=1, le=1024, description="trainers, each with a replica of the dense network")
    num_embeddings: int = Field(1_000_000, ge=1, le=2**31 - 1, description="rows of the table")
    embedding_dim: int = Field(64, ge=1, le=65536, description="width of a row")
    hidden_size: int = Field(64, ge=0, le=65536, description="width of the dense network's hidden layer; 0: none")
    batch_size: int = Field(64, ge=1, le=1_000_000, description="samples of one trainer in a step")
    epochs: Epochs = 5
    optimizer: Literal["adagrad", "sgd"] = Field(
        "adagrad", description="adagrad (row-wise for the table) or sgd, each where its parameters are"
    )
    lr: float = Field(0.05, gt=0, description="learning rate")
    dataset: str = Field(
        "stdlib",
        min_length=1,
        description="stdlib (which package do these lines of Python come from?), or package.module:function that "
        "returns the training and the test samples",
    )
    step_timeout: Seconds = Field(60.0, description="deadline of a step, and of each call and all-reduce in it")


JOB = Job(
    summary="a sharded embedding table on servers, a dense network under DDP on trainers, a master driving them",
    settings=HybridSettings,
    roles=(
        Role("master", "rolecall.jobs.hybrid.master:run", preload=("rolecall.jobs.hybrid.master",)),
        Role("ps", "rolecall.jobs.hybrid.server:run", "SERVERS", preload=("rolecall.jobs.hybrid.calls",)),
        Role("trainer", "rolecall.jobs.hybrid.trainer:run", "TRAINERS", preload=("rolecall.jobs.hybrid.trainer",)),
    ),
    check="rolecall.jobs.hybrid.data:check",
    evaluate="rolecall.jobs.hybrid.evaluate:evaluate",
    export="rolecall.jobs.hybrid.export:export",
    metrics=METRICS,
    score="accuracy",
    unit="samples",
    # what the weights and the order of the samples depend on
    pinned=("dataset", "num_embeddings", "embedding_dim", "hidden_size", "optimizer", "seed"),
)  # fmt: skip
