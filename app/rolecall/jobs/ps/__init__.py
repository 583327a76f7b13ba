"""Parameter server: trainers compute gradients, servers hold the parameters and update them.

After "Implementing a parameter server using distributed RPC framework" of the PyTorch tutorials; what differs and why
is in docs/ps.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolecall import Epochs, FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.ps.metrics import METRICS


class PsSettings(Settings):
    """The variables of `ps`."""

    servers: int = Field(1, ge=1, le=64, description="servers that the parameters are sharded over, rank 0 included")
    trainers: int = Field(2, ge=1, le=1024, description="trainers that a start waits for")
    min_trainers: int = Field(1, ge=1, le=1024, description="fewest trainers to train with")
    max_trainers: int = Field(64, ge=1, le=1024, description="most trainers taken in")
    update_mode: Literal["sync", "async", "local", "autograd"] = Field(
        "sync",
        description="sync: one update from the mean of all trainers' gradients; async: one from each gradient; "
        "local: one from the mean of what INNER_STEPS steps of each trainer changed (DiLoCo); "
        "autograd: as async, with the model itself on the server and distributed autograd",
    )
    inner_steps: int = Field(
        50, ge=1, le=1_000_000, description="steps of BATCH_SIZE samples that a trainer makes by itself (local)"
    )
    round_seconds: float = Field(
        0.0,
        ge=0,
        le=86400,
        description="seconds after which a trainer ends its inner steps early, for trainers of different speeds; 0: "
        "none (local)",
    )
    outer_lr: float = Field(0.7, gt=0, le=10, description="learning rate of the servers' optimizer (local)")
    outer_momentum: float = Field(0.5, ge=0, lt=1, description="Nesterov momentum of the servers' optimizer (local)")
    max_staleness: int = Field(
        64,
        ge=0,
        le=100_000,
        description="updates that parameters may have had since a gradient was computed with them; older gradients "
        "are refused and their batches computed again (async, autograd, LATE_GRADIENTS=use); 0: no steps beside an "
        "exchange (local)",
    )
    backup_trainers: int = Field(
        0,
        ge=0,
        le=1023,
        description="an update closes without the gradients of this many trainers, the latest (sync)",
    )
    late_gradients: Literal["drop", "use"] = Field(
        "drop",
        description="a gradient that comes after its update with BACKUP_TRAINERS. drop: its batch is handed out again; "
        "use: it is a part of the next update, divided by its staleness",
    )
    wire_dtype: Literal["float32", "bfloat16", "int8", "int4"] = Field(
        "float32",
        description="type of gradients and parameters on the network; int8 and int4 have a scale for each 256 elements",
    )
    top_k: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a gradient's elements that travels, the largest; the rest is held back; likewise of the "
        "parameters' changes; 0: all (sync, async, local)",
    )
    batch_size: int = Field(32, ge=1, le=1_000_000, description="samples of one trainer's gradient")
    epochs: Epochs = 30
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description="the optimizer: of the servers, with UPDATE_MODE=local each trainer's own"
    )
    lr: float = Field(0.03, gt=0, le=10, description="learning rate")
    lr_schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="cosine: the learning rate falls from LR to 0 over EPOCHS, on a half cosine"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    dropout: float = Field(0.25, ge=0, lt=0.5, description="the ConvNet's first dropout; the second is twice that")
    dataset: Annotated[str, FromUser(unless="mnist")] = Field(
        "digits",
        min_length=1,
        description="digits (in scikit-learn), mnist (in DATA_DIR), or package.module:function that returns the "
        "training and the test dataset",
    )
    data_dir: PerRank[Path] = Field(
        Path("data"), description="directory of mnist's files; downloaded there where absent"
    )
    model: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:factory of a torch module from inputs to class logits or log-probabilities; "
        "empty: the tutorial's ConvNet",
    )
    num_gpus: PerRank[int] = Field(
        0, ge=0, le=2, description="GPUs of the server's model in UPDATE_MODE=autograd: convolutions, then the rest"
    )
    step_timeout: Seconds = Field(
        60.0, description="deadline of one trainer's gradient; with UPDATE_MODE=local of each of its steps"
    )

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if self.update_mode == "autograd" and self.servers > 1:
            raise ValueError(f"SERVERS={self.servers}: UPDATE_MODE=autograd has the whole model on one server")
        return self

    @model_validator(mode="after")
    def _compression(self) -> Self:
        if self.update_mode == "autograd" and (self.wire_dtype != "float32" or self.top_k):
            raise ValueError(
                f"WIRE_DTYPE={self.wire_dtype} TOP_K={self.top_k:g}: with UPDATE_MODE=autograd activations travel, as "
                "they are; set WIRE_DTYPE=float32 and TOP_K=0, or another UPDATE_MODE"
            )
        if self.top_k and self.optimizer == "adam" and self.update_mode in ("sync", "async"):
            raise ValueError(
                f"TOP_K={self.top_k:g}: OPTIMIZER=adam would divide by what was held back; set OPTIMIZER=sgd, or "
                "UPDATE_MODE=local"
            )
        return self

    @model_validator(mode="after")
    def _backup(self) -> Self:
        if self.backup_trainers and self.update_mode != "sync":
            raise ValueError(f"BACKUP_TRAINERS={self.backup_trainers}: goes with UPDATE_MODE=sync only; set 0")
        if self.backup_trainers and self.late_gradients == "use" and not self.max_staleness:
            raise ValueError(
                "MAX_STALENESS=0: would refuse every late gradient; set LATE_GRADIENTS=drop, or MAX_STALENESS=1 or more"
            )
        if self.backup_trainers >= self.trainers:
            raise ValueError(
                f"BACKUP_TRAINERS={self.backup_trainers}: must be less than TRAINERS={self.trainers}, "
                "an update needs a gradient"
            )
        return self


JOB = Job(
    summary="parameter server: trainers push gradients, servers update and hand out parameters",
    settings=PsSettings,
    roles=(
        Role("ps", "rolecall.jobs.ps.lead:run", "SERVERS", preload=("rolecall.jobs.ps.lead",)),
        Role("trainer", "rolecall.jobs.ps.trainer:run", "TRAINERS", "MIN_TRAINERS", "MAX_TRAINERS",
             preload=("rolecall.jobs.ps.trainer",)),
    ),
    check="rolecall.jobs.ps.model:check",
    evaluate="rolecall.jobs.ps.evaluate:evaluate",
    export="rolecall.jobs.ps.export:export",
    metrics=METRICS,
    score="accuracy",
    unit="samples",
    pinned=("dataset", "model", "seed"),
)  # fmt: skip
