"""A large embedding table on servers, a dense network replicated on trainers by DistributedDataParallel, and a master
that commands both.

After the PyTorch tutorial "Combining Distributed DataParallel with Distributed RPC Framework". docs/hybrid.md lists the
differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, field_serializer, model_validator

from rolecall import FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.hybrid.metrics import METRICS

ROW_BYTES = 4 + 4 + 1  # memory for a row on disk
SLOT_BYTES = 4 + 4 + 4 + 8 + 1  # memory for a hot row without its values
MIN_HOT_ROWS = 1024
DEFAULT_FILTER_IDS = 2**24


class HybridSettings(Settings):
    """The settings of `hybrid`."""

    servers: int = Field(1, ge=1, le=64, description="servers that the table's rows are sharded over")
    trainers: int = Field(2, ge=1, le=1024, description="trainers, each with a replica of the dense network")
    num_embeddings: int = Field(1_000_000, ge=1, le=2**31 - 1, description="rows of the table")
    embedding_dim: int = Field(64, ge=1, le=65536, description="width of a row")
    hidden_size: int = Field(64, ge=0, le=65536, description="width of the dense network's hidden layer; 0: none")
    batch_size: int = Field(64, ge=1, le=1_000_000, description="samples of one trainer in a step")
    epochs: int = Field(5, ge=1, le=1_000_000, description="passes over the training data")
    table: Literal["fixed", "hashed"] = Field(
        "fixed", description="fixed (NUM_EMBEDDINGS rows) or hashed (a row for each 64-bit id that occurs again)"
    )
    max_rows: int = Field(
        1_000_000,
        ge=1,
        le=2**31 - 1,
        description="TABLE=hashed: maximum rows of a server; the least recently used are evicted",
    )
    ttl: int = Field(0, ge=0, description="TABLE=hashed: steps without a lookup after which a row is evicted; 0: never")
    sightings: int = Field(
        2, ge=1, le=2, description="TABLE=hashed: number of steps with an id, 1 or 2, before it gets a row"
    )
    filter_ids: int = Field(
        DEFAULT_FILTER_IDS,
        ge=1,
        le=2**40,
        description="TABLE=hashed: cells of the filter of ids seen once, of all servers",
    )
    table_memory: ByteSize = Field(
        ByteSize(0),
        description="memory for the rows of a server (256MB, 8GiB), the others are on disk; 0: all are in memory",
    )
    table_dir: PerRank[Path | None] = Field(
        None, description="directory of a server for rows beyond TABLE_MEMORY; default: CHECKPOINT_DIR/table"
    )
    optimizer: Literal["adagrad", "sgd"] = Field("adagrad", description="adagrad (row-wise for the table) or sgd")
    lr: float = Field(0.05, gt=0, description="learning rate")
    dataset: Annotated[str, FromUser()] = Field(
        "stdlib",
        min_length=1,
        description="stdlib (the package of some lines of Python), or package.module:function that returns the "
        "training and the test samples",
    )
    step_timeout: Seconds = Field(60.0, description="deadline of a step, and of its calls and all-reduces")

    @property
    def hot_rows(self) -> int:
        """Rows in memory of the server with the most rows; 0 if all are in memory. TABLE_MEMORY also holds the place on
        disk of each row, the square of Adagrad, and a mark for checkpoints.
        """
        rows = -(-self.num_embeddings // self.servers)
        hot = max(0, int(self.table_memory) - rows * ROW_BYTES) // (4 * self.embedding_dim + SLOT_BYTES)
        return hot if hot < rows else 0

    @field_serializer("filter_ids")
    def _pinned_filter_ids(self, value: int) -> int:
        """The checkpoints of a fixed table do not depend on FILTER_IDS."""
        return value if self.table == "hashed" else DEFAULT_FILTER_IDS

    @model_validator(mode="after")
    def _has_memory(self) -> Self:
        if self.table_memory and self.table == "hashed":
            raise ValueError("TABLE_MEMORY goes with TABLE=fixed only; MAX_ROWS bounds the memory of a hashed table")
        rows = -(-self.num_embeddings // self.servers)
        least = rows * ROW_BYTES + min(rows, MIN_HOT_ROWS) * (4 * self.embedding_dim + SLOT_BYTES)
        if 0 < self.table_memory < least:  # also if all rows fit
            problem = f"must be at least {least} bytes for {rows} rows of width {self.embedding_dim} a server"
            raise ValueError(f"TABLE_MEMORY={int(self.table_memory)}: {problem}; set more memory, or more SERVERS")
        return self

    @property
    def cells(self) -> int:
        """Cells of the filter of ids of all servers; 0 for a fixed table."""
        return self.filter_ids if self.table == "hashed" else 0


JOB = Job(
    summary="a sharded embedding table on servers, a dense network under DDP on trainers, and a master",
    settings=HybridSettings,
    roles=(
        Role("master", "rolecall.jobs.hybrid.master:Master", preload=("rolecall.jobs.hybrid.master",)),
        Role(
            "ps",
            "rolecall.jobs.hybrid.server:TableServer",
            "SERVERS",
            preload=("rolecall.jobs.hybrid.server",),
            stays=True,
        ),
        Role("trainer", "rolecall.jobs.hybrid.trainer:Trainer", "TRAINERS", preload=("rolecall.jobs.hybrid.trainer",)),
    ),
    check="rolecall.jobs.hybrid.data:check",
    evaluate="rolecall.jobs.hybrid.evaluate:evaluate",
    export="rolecall.jobs.hybrid.export:export",
    metrics=METRICS,
    score="accuracy",
    unit="samples",
    # the weights and the order of the samples depend on these
    pinned=("dataset", "table", "filter_ids", "num_embeddings", "embedding_dim", "hidden_size", "optimizer", "seed"),
)
