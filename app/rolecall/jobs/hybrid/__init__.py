"""A large embedding table on servers, a dense network replicated on trainers by DistributedDataParallel, and a master
that drives both.

After the PyTorch tutorial "Combining Distributed DataParallel with Distributed RPC Framework"; docs/hybrid.md explains
the differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, field_serializer, model_validator

from rolecall import Epochs, FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.hybrid.metrics import METRICS

BYTES_OF_A_ROW = 4 + 4 + 1  # in memory of a row on disk
BYTES_OF_A_SLOT = 4 + 4 + 4 + 8 + 1  # in memory of a hot row, beside its values
LEAST_HOT_ROWS = 1024
FILTER_IDS = 2**24


class HybridSettings(Settings):
    """The variables of `hybrid`."""

    servers: int = Field(1, ge=1, le=64, description="servers that the table's rows are sharded over")
    trainers: int = Field(2, ge=1, le=1024, description="trainers, each with a replica of the dense network")
    num_embeddings: int = Field(1_000_000, ge=1, le=2**31 - 1, description="rows of the table")
    embedding_dim: int = Field(64, ge=1, le=65536, description="width of a row")
    hidden_size: int = Field(64, ge=0, le=65536, description="width of the dense network's hidden layer; 0: none")
    batch_size: int = Field(64, ge=1, le=1_000_000, description="samples of one trainer in a step")
    epochs: Epochs = 5
    table: Literal["fixed", "hashed"] = Field(
        "fixed", description="fixed (NUM_EMBEDDINGS rows) or hashed (a row for each 64-bit id that comes again)"
    )
    max_rows: int = Field(
        1_000_000, ge=1, le=2**31 - 1, description="TABLE=hashed: rows of a server at most; the least recently used go"
    )
    ttl: int = Field(0, ge=0, description="TABLE=hashed: steps after which a row that was not looked up goes; 0: never")
    sightings: int = Field(2, ge=1, le=2, description="TABLE=hashed: 1 or 2, the step with an id that gives it a row")
    filter_ids: int = Field(
        FILTER_IDS, ge=1, le=2**40, description="TABLE=hashed: ids seen once that are remembered, over all servers"
    )
    table_memory: ByteSize = Field(
        ByteSize(0), description="memory for a server's rows (256MB, 8GiB), which lie on disk; 0: all are in memory"
    )
    table_dir: PerRank[Path | None] = Field(
        None, description="a server's directory for rows past TABLE_MEMORY, by default CHECKPOINT_DIR/table"
    )
    optimizer: Literal["adagrad", "sgd"] = Field(
        "adagrad", description="adagrad (row-wise for the table) or sgd, each where its parameters are"
    )
    lr: float = Field(0.05, gt=0, description="learning rate")
    dataset: Annotated[str, FromUser()] = Field(
        "stdlib",
        min_length=1,
        description="stdlib (which package do these lines of Python come from?), or package.module:function that "
        "returns the training and the test samples",
    )
    step_timeout: Seconds = Field(60.0, description="deadline of a step, and of each call and all-reduce in it")

    @property
    def hot_rows(self) -> int:
        """Rows that TABLE_MEMORY holds, of the server that has most, beside what it holds of every row: where it is,
        Adagrad's square, and marks for checkpoints. 0 where all are in memory.
        """
        rows = -(-self.num_embeddings // self.servers)
        hot = max(0, int(self.table_memory) - rows * BYTES_OF_A_ROW) // (4 * self.embedding_dim + BYTES_OF_A_SLOT)
        return hot if hot < rows else 0

    @field_serializer("filter_ids")
    def _pinned_filter_ids(self, value: int) -> int:
        """A fixed table's checkpoints do not depend on it."""
        return value if self.table == "hashed" else FILTER_IDS

    @model_validator(mode="after")
    def _has_memory(self) -> Self:
        if self.table_memory and self.table == "hashed":
            raise ValueError("TABLE_MEMORY goes with TABLE=fixed only; MAX_ROWS bounds the memory of a hashed table")
        rows = -(-self.num_embeddings // self.servers)
        least = rows * BYTES_OF_A_ROW + min(rows, LEAST_HOT_ROWS) * (4 * self.embedding_dim + BYTES_OF_A_SLOT)
        if 0 < self.table_memory < least:  # a share that fits has as much
            problem = f"must be at least {least} bytes for {rows} rows of width {self.embedding_dim} a server"
            raise ValueError(f"TABLE_MEMORY={int(self.table_memory)}: {problem}; set more of it, or more SERVERS")
        return self

    @property
    def cells(self) -> int:
        """Cells of the filter of ids, of which each belongs to a server; 0 for a fixed table."""
        return self.filter_ids if self.table == "hashed" else 0


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
    pinned=(
        "dataset",
        "table",
        "filter_ids",
        "num_embeddings",
        "embedding_dim",
        "hidden_size",
        "optimizer",
        "seed",
    ),
)
