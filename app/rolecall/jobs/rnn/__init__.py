"""A word language model split over two ranks: the `ps` has the embedding table and the decoder, the `trainer` the LSTM.

After "Getting started with distributed RPC framework", second part, of the PyTorch tutorials, and the
word_language_model of the PyTorch examples; what differs and why is in docs/rnn.md.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolecall import Epochs, FromUser, Job, PerRank, Role, Seconds, Settings
from rolecall.jobs.rnn.metrics import METRICS


class RnnSettings(Settings):
    """The variables of `rnn`."""

    corpus: Annotated[PerRank[str], FromUser()] = Field(
        "stdlib",
        min_length=1,
        description="text to learn: stdlib (the source of the Python standard library here), a file, or a folder",
    )
    corpus_bytes: int = Field(
        1_000_000, ge=0, le=10**12, description="bytes of the corpus to use, files in an order of SEED; 0: all"
    )
    tokens: Literal["word", "byte"] = Field("word", description="what the text is cut into")
    vocabulary: int = Field(
        8192, ge=2, le=10_000_000, description="words known: the most frequent; the rest are unknown"
    )
    embedding_size: int = Field(200, ge=1, le=65536, description="width of the embedding")
    hidden_size: int = Field(200, ge=1, le=65536, description="width of the LSTM")
    layers: int = Field(2, ge=1, le=64, description="layers of the LSTM")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout of what goes into each layer and into the decoder")
    batch_size: int = Field(20, ge=1, le=65536, description="streams of text that are read side by side")
    sequence: int = Field(35, ge=1, le=65536, description="tokens of a stream in a step: how far gradients reach back")
    micro_batches: int = Field(
        2, ge=1, le=16, description="parts of a step's streams, which the ranks work on at the same time"
    )
    epochs: Epochs = 3
    optimizer: Literal["adam", "sgd"] = Field(
        "adam", description="adam (SparseAdam for the embedding) or sgd, each where its parameters are"
    )
    lr: float = Field(2e-3, gt=0, description="learning rate")
    max_grad_norm: float = Field(
        1.0, gt=0, le=1e9, description="gradients of both ranks are clipped to this global norm"
    )
    embedding_device: PerRank[Literal["auto", "cpu", "cuda"]] = Field(
        "auto", description="where the ps holds the embedding; auto: as DEVICE, where the rest of it is"
    )
    sample_tokens: int = Field(100, ge=0, le=100_000, description="tokens of the text that is generated")
    temperature: float = Field(0.8, gt=0, le=100, description="of generated text: lower keeps to what is likely")
    step_timeout: Seconds = Field(60.0, description="deadline of one call that computes")

    @model_validator(mode="after")
    def _micro(self) -> Self:
        if self.micro_batches > self.batch_size:
            raise ValueError(f"MICRO_BATCHES={self.micro_batches}: more than BATCH_SIZE={self.batch_size}")
        return self


JOB = Job(
    summary="language model: embedding and decoder on the ps, LSTM on the trainer, distributed autograd",
    settings=RnnSettings,
    roles=(
        Role("ps", "rolecall.jobs.rnn.server:run", preload=("rolecall.jobs.rnn.server",)),
        Role("trainer", "rolecall.jobs.rnn.trainer:run", preload=("rolecall.jobs.rnn.trainer",)),
    ),
    check="rolecall.jobs.rnn.corpus:check",
    evaluate="rolecall.jobs.rnn.evaluate:evaluate",
    complete="rolecall.jobs.rnn.evaluate:complete",
    export="rolecall.jobs.rnn.export:export",
    metrics=METRICS,
    score="perplexity",
    unit="tokens",
    lower=True,
    # what the weights and the order of the text depend on
    pinned=("corpus", "corpus_bytes", "tokens", "vocabulary", "embedding_size", "hidden_size", "layers", "batch_size",
            "sequence", "seed"),
)  # fmt: skip
