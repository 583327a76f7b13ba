"""A word language model split over two ranks: the `ps` holds the embedding and the decoder, the `trainer` the LSTM.

After "Getting started with distributed RPC framework", second part, of the PyTorch tutorials, and the
word_language_model of the PyTorch examples. docs/rnn.md lists the differences.

`corpus`: text, tokens, batches. `evaluate`: perplexity and generated text. `export`: the model as one module. `loss`:
cross-entropy in blocks. `metrics`: the metrics. `model`: the three parts of the model. `optimizer`: each rank's
optimizers. `roles`: the ps, rank 0, and the trainer.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolecall import FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.rnn.metrics import METRICS


class RnnSettings(Settings):
    """The settings of `rnn`."""

    corpus: Annotated[PerRank[str], FromUser()] = Field(
        "stdlib",
        min_length=1,
        description="text to train on: stdlib (the source of the Python standard library), a file or a folder",
    )
    corpus_bytes: int = Field(
        1_000_000, ge=0, le=10**12, description="bytes of the corpus to use; SEED determines the order of files; 0: all"
    )
    vocabulary: int = Field(
        8192, ge=2, le=10_000_000, description="size of the vocabulary: the most frequent words; others are unknown"
    )
    embedding_size: int = Field(200, ge=1, le=65536, description="width of the embedding")
    hidden_size: int = Field(200, ge=1, le=65536, description="width of the LSTM")
    layers: int = Field(2, ge=1, le=64, description="layers of the LSTM")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout before each LSTM layer and before the decoder")
    batch_size: int = Field(20, ge=1, le=65536, description="streams of text that are read in parallel")
    sequence: int = Field(35, ge=1, le=65536, description="tokens of a stream in a step; back-propagation's length")
    micro_batches: int = Field(
        2, ge=1, le=16, description="parts of a batch, which the two ranks process at the same time"
    )
    epochs: int = Field(3, ge=1, le=1_000_000, description="passes over the training data")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="adam (SparseAdam for the embedding) or sgd")
    lr: float = Field(2e-3, gt=0, description="learning rate")
    step_timeout: Seconds = Field(60.0, description="deadline of one remote call of a step")

    @model_validator(mode="after")
    def _micro(self) -> Self:
        if self.micro_batches > self.batch_size:
            raise ValueError(f"MICRO_BATCHES={self.micro_batches}: more than BATCH_SIZE={self.batch_size}")
        return self


JOB = Job(
    summary="language model: embedding and decoder on the ps, LSTM on the trainer, gradients that cross calls",
    settings=RnnSettings,
    roles=(
        Role("ps", "rolecall.jobs.rnn.roles:ModelServer", preload=("rolecall.jobs.rnn.roles",)),
        Role("trainer", "rolecall.jobs.rnn.roles:Trainer", preload=("rolecall.jobs.rnn.roles",), stays=True),
    ),
    check="rolecall.jobs.rnn.corpus:check",
    evaluate="rolecall.jobs.rnn.evaluate:evaluate",
    complete="rolecall.jobs.rnn.evaluate:complete",
    export="rolecall.jobs.rnn.export:export",
    metrics=METRICS,
    score="perplexity",
    unit="tokens",
    lower=True,
    # the shapes of the weights and the order of the text depend on these
    pinned=(
        "corpus",
        "corpus_bytes",
        "vocabulary",
        "embedding_size",
        "hidden_size",
        "layers",
        "batch_size",
        "sequence",
        "seed",
    ),
)
