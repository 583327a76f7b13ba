"""Parameter server: trainers compute gradients, servers hold the parameters and update them.

After "Implementing a parameter server using distributed RPC framework" of the PyTorch tutorials; docs/ps.md lists the
differences and their reasons.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolecall import FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.ps.metrics import METRICS


class PsSettings(Settings):
    """The variables of `ps`."""

    servers: int = Field(1, ge=1, le=64, description="servers that the parameters are sharded over, rank 0 included")
    trainers: int = Field(2, ge=1, le=1024, description="trainers that a start waits for")
    min_trainers: int = Field(1, ge=1, le=1024, description="fewest trainers to train with")
    max_trainers: int = Field(64, ge=1, le=1024, description="most trainers that are admitted")
    shares: int = Field(
        0, ge=0, le=1024, description="batches of an update, whichever trainers compute them (sync); 0: TRAINERS"
    )
    update_mode: Literal["sync", "async", "local", "autograd"] = Field(
        "sync",
        description="sync: an update is the mean of all trainers' gradients; async: of each gradient by itself; "
        "local: of what INNER_STEPS steps of each trainer changed (DiLoCo); "
        "autograd: as async, with the model on rank 0, through which gradients cross",
    )
    inner_steps: int = Field(
        50, ge=1, le=1_000_000, description="steps of BATCH_SIZE samples between two exchanges of a trainer (local)"
    )
    outer_lr: float = Field(0.7, gt=0, le=10, description="learning rate of the servers' optimizer (local)")
    outer_momentum: float = Field(0.5, ge=0, lt=1, description="Nesterov momentum of the servers' optimizer (local)")
    max_staleness: int = Field(
        64,
        ge=0,
        le=100_000,
        description="updates since the parameters that a gradient was computed with; a staler gradient is refused and "
        "its batch computed again (async, autograd); 0: a trainer computes nothing during an exchange (local)",
    )
    wire_dtype: Literal["float32", "int8", "int4"] = Field(
        "float32",
        description="type of gradients and parameters on the network; int8 and int4 have a scale for each 256 elements",
    )
    batch_size: int = Field(32, ge=1, le=1_000_000, description="samples of one trainer's gradient")
    epochs: int = Field(30, ge=1, le=1_000_000, description="passes over the training data")
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description="optimizer of the servers; with UPDATE_MODE=local of each trainer"
    )
    lr: float = Field(0.03, gt=0, le=10, description="learning rate")
    lr_schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="cosine: the learning rate falls from LR to 0 over EPOCHS, on a half cosine"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    dataset: Annotated[str, FromUser(unless="mnist")] = Field(
        "digits",
        min_length=1,
        description="digits (in scikit-learn), mnist (in DATA_DIR), or package.module:function that returns the "
        "training and the test dataset",
    )
    data_dir: PerRank[Path] = Field(
        Path("data"), description="directory of mnist's files; they are downloaded if they are absent"
    )
    model: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:factory of a torch module from inputs to class logits or log-probabilities; "
        "empty: the tutorial's ConvNet",
    )
    step_timeout: Seconds = Field(
        60.0, description="deadline of one trainer's gradient; with UPDATE_MODE=local of each of its steps"
    )

    @model_validator(mode="after")
    def _autograd(self) -> Self:
        if self.update_mode == "autograd" and self.servers > 1:
            raise ValueError(f"SERVERS={self.servers}: UPDATE_MODE=autograd has the whole model on one server")
        if self.update_mode == "autograd" and self.wire_dtype != "float32":
            raise ValueError(
                f"WIRE_DTYPE={self.wire_dtype}: UPDATE_MODE=autograd sends activations in float32; set "
                "WIRE_DTYPE=float32 or another UPDATE_MODE"
            )
        return self

    @property
    def update_batches(self) -> int:
        """The batches of each update, whichever trainers compute them; 0: it depends on who is there."""
        return (self.shares or self.trainers) if self.update_mode == "sync" else 0


JOB = Job(
    summary="parameter server: trainers push gradients, servers update and hand out parameters",
    settings=PsSettings,
    roles=(
        Role("ps", "rolecall.jobs.ps.lead:ParameterServer", "SERVERS", preload=("rolecall.jobs.ps.lead",)),
        Role(
            "trainer",
            "rolecall.jobs.ps.trainer:Trainer",
            "TRAINERS",
            "MIN_TRAINERS",
            "MAX_TRAINERS",
            preload=("rolecall.jobs.ps.trainer",),
        ),
    ),
    check="rolecall.jobs.ps.model:check",
    evaluate="rolecall.jobs.ps.evaluate:evaluate",
    export="rolecall.jobs.ps.export:export",
    metrics=METRICS,
    score="accuracy",
    unit="samples",
    pinned=("dataset", "model", "seed"),
)
