"""The trainer: reads the text, builds the model on both ranks, and makes the steps that the ps requests."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.futures import Future

from rolecall import Context, RankObject, UsageError, in_turn
from rolecall.jobs.rnn import RnnSettings, calls, corpus, optimizer
from rolecall.jobs.rnn.corpus import Vocabulary
from rolecall.jobs.rnn.model import Lstm


def run(context: Context[RnnSettings]) -> None:
    """Prepares this rank for the calls below, which the ps makes."""
    TRAINER.set(Trainer(context))


@dataclass(frozen=True)
class TextDescription:
    """The text that the trainer has read. An epoch is `steps` steps over `tokens` tokens, of which `targets` are
    predicted.
    """

    corpus: str
    digest: str
    vocabulary: Vocabulary
    tokens: int
    targets: int
    steps: int

    def state_dict(self) -> dict[str, Any]:
        """The part that a checkpoint contains."""
        return {"digest": self.digest, "vocabulary": list(self.vocabulary.words)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UsageError if `state` is of another text."""
        if (state["digest"], state["vocabulary"]) != (self.digest, list(self.vocabulary.words)):  # bytes had none
            raise UsageError(
                f"CORPUS={self.corpus}: the newest checkpoint was trained on another text, or on bytes; restore that "
                "text, or set another CHECKPOINT_DIR"
            )


class Trainer:
    """The text, the LSTM and its state, references to the modules at the ps, and the optimizers of both ranks."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        settings = self.settings
        self.ps = context.members[0].name
        self.device = context.device
        self.wire = self.device if self.ps in context.mapped else torch.device("cpu")
        with context.phase("loading"):
            self.text = corpus.load(settings)
        self.train_streams = corpus.streams(self.text.train, settings.batch_size)
        self.validation_streams = corpus.streams(self.text.validation, settings.batch_size)
        columns = torch.arange(settings.batch_size).chunk(settings.micro_batches)
        self.micro_batches = [slice(int(part[0]), int(part[-1]) + 1) for part in columns]
        self.lstm = Lstm(settings).to(self.device)
        self.state = self.lstm.start(settings.batch_size)
        torch.manual_seed(settings.seed)  # dropout is the same in every generation
        self.embedding, self.decoder = (
            rpc.remote(self.ps, calls.build, args=(name, len(self.text.vocabulary)), timeout=settings.phase_timeout)
            for name in ("embedding", "decoder")
        )
        dense = [*optimizer.references(self.lstm), *self.wait(calls.parameters, self.decoder)]
        self.optimizers = optimizer.build(settings, dense, self.wait(calls.parameters, self.embedding))

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls `function` at the ps."""
        return self.context.call(self.ps, function, *args, timeout=self.settings.step_timeout)  # type: ignore[no-any-return]

    def wait(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` at the ps, and waits for its result."""
        (answer,) = self.context.wait_all([self.call(function, *args)])
        return answer


TRAINER: RankObject[Trainer] = RankObject()


@in_turn
def describe() -> TextDescription:
    """Describes the text, once it is read and the model is built."""
    trainer = TRAINER.get()
    text = trainer.text
    return TextDescription(
        corpus=trainer.settings.corpus,
        digest=text.digest,
        vocabulary=text.vocabulary,
        tokens=len(text.train),
        targets=corpus.targets(trainer.train_streams),
        steps=corpus.steps(trainer.train_streams, trainer.settings.sequence),
    )


@in_turn
def train(step: int) -> tuple[float, int]:
    """Makes a step. Returns the mean loss per token, and the number of predicted tokens."""
    trainer = TRAINER.get()
    settings, metrics, context = trainer.settings, trainer.metrics, trainer.context
    position = (step - 1) % corpus.steps(trainer.train_streams, settings.sequence)
    inputs, targets = corpus.window(trainer.train_streams, position, settings.sequence)
    if position == 0:
        trainer.state = trainer.lstm.start(settings.batch_size)
    trainer.lstm.train()
    with dist_autograd.context() as context_id:
        # forward pass: the ps decodes one micro-batch while the LSTM processes the next
        waited, losses, states, parts = 0.0, [], [], trainer.micro_batches
        lookups = [trainer.call(calls.embed, trainer.embedding, inputs[:, part].contiguous()) for part in parts]
        for part, lookup in zip(parts, lookups, strict=True):
            with context.timer() as timer:
                (vectors,) = context.wait_all([lookup])
            waited += timer.seconds
            with metrics.rnn_lstm_seconds.time():
                hidden, cell = (each[:, part].contiguous() for each in trainer.state)
                output, after = trainer.lstm(vectors.to(trainer.device), (hidden, cell))
            states.append(after)
            arguments = output.to(trainer.wire), targets[:, part].contiguous(), 1 / targets.numel()
            losses.append(trainer.call(calls.decode, context_id, trainer.decoder, *arguments))
        with context.timer() as timer:
            mean = torch.stack(context.wait_all(losses)).sum()
        metrics.rnn_wait_seconds.observe(waited + timer.seconds)
        # one backward pass for all micro-batches: torch's engine waits for every call made in the context, so a pass
        # for a single micro-batch would never end
        with metrics.rnn_backward_seconds.time():
            dist_autograd.backward(context_id, [mean])  # type: ignore[attr-defined]
        with metrics.rnn_optimizer_seconds.time():
            norm = trainer.wait(calls.clip, context_id, optimizer.square_norm(context_id))
            loss = float(mean.detach())
            context.require_finite(loss, norm, hint="the loss or its gradient is not finite; lower LR")
            optimizer.clip(context_id, norm)
            for each in trainer.optimizers:
                each.step(context_id)
    hidden, cell = (torch.cat(columns, 1).detach() for columns in zip(*states, strict=True))
    trainer.state = hidden, cell
    metrics.rnn_grad_norm.set(norm)
    for direction, width in (("received", settings.hidden_size), ("sent", settings.embedding_size)):
        metrics.rnn_gradient_bytes.labels(direction).inc(4 * width * targets.numel())
    context.report_step(step)
    return loss, targets.numel()


@in_turn
@torch.no_grad()
def validate() -> float:
    """The mean loss per token of the validation text."""
    trainer = TRAINER.get()
    trainer.lstm.eval()
    streams, sequence = trainer.validation_streams, trainer.settings.sequence
    state, total = trainer.lstm.start(trainer.settings.batch_size), 0.0
    pending: list[Future[float]] = []
    for number in range(corpus.steps(streams, sequence)):
        inputs, targets = corpus.window(streams, number, sequence)
        vectors = trainer.wait(calls.embed, trainer.embedding, inputs).detach()
        output, state = trainer.lstm(vectors.to(trainer.device), state)
        pending.append(trainer.call(calls.validate, trainer.decoder, output.to(trainer.wire), targets))
        if len(pending) > 1:  # while the ps computes the newest
            total += float(*trainer.context.wait_all([pending.pop(0)]))
    total += float(sum(trainer.context.wait_all(pending)))
    return total / corpus.targets(streams)


@in_turn
def save() -> bytes:
    """The trainer's part of a checkpoint, serialized by torch: `load` continues exactly from it."""
    trainer, file = TRAINER.get(), io.BytesIO()
    (local,) = optimizer.LOCAL
    state = {
        "lstm": trainer.lstm.state_dict(),
        "optimizer": local.state_dict(),
        "state": trainer.state,
        "rng": torch.get_rng_state(),
    }
    torch.save(state, file)
    return file.getvalue()


@in_turn
def load(state: dict[str, Any]) -> None:
    """Continues from the trainer's part of a checkpoint."""
    trainer = TRAINER.get()
    (local,) = optimizer.LOCAL
    trainer.lstm.load_state_dict(state["lstm"])
    local.load_state_dict(state["optimizer"])
    hidden, cell = state["state"]
    trainer.state = hidden.to(trainer.device), cell.to(trainer.device)
    torch.set_rng_state(state["rng"])
