"""The two roles: the ps, rank 0, holds the embedding and the decoder and makes the steps; the trainer has the text and
the LSTM, through which each step goes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rolecall import Context, Future, remote
from rolecall.jobs.rnn import RnnSettings, corpus, optimizer
from rolecall.jobs.rnn.corpus import TextDescription
from rolecall.jobs.rnn.evaluate import perplexity
from rolecall.jobs.rnn.loss import LossThreads
from rolecall.jobs.rnn.model import Decoder, Embedding, Lstm


class ModelServer:
    """The ps. No logits leave it."""

    # made once the text is known
    text: TextDescription
    embedding: Embedding
    decoder: Decoder

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.calls = context.options(timeout=context.settings.step_timeout)
        self.loss_threads = LossThreads(context.threads)
        self.asked = dict[tuple[bool, int], Future[tuple[Tensor, Tensor]]]()  # windows of the text
        batch = torch.arange(context.settings.batch_size)
        self.parts = [slice(int(part[0]), int(part[-1]) + 1) for part in batch.chunk(context.settings.micro_batches)]

    def run(self) -> dict[str, Any]:
        """Trains for EPOCHS, and validates after each."""
        context, settings = self.context, self.settings
        (self.trainer,) = context.peers("trainer")
        (self.text,) = context.call_all(Trainer.describe)
        text = self.text
        self.embedding = Embedding(settings, len(text.vocabulary)).to(context.device)
        self.decoder = Decoder(settings, len(text.vocabulary)).to(context.device)
        dense, sparse = optimizer.dense(settings, self.decoder), optimizer.sparse(settings, self.embedding)
        context.optimize(dense)
        context.optimize(sparse)
        state = context.restore(
            {
                "text": text,
                "embedding": self.embedding,
                "decoder": self.decoder,
                "dense": dense,
                "sparse": sparse,
                "trainer": TrainerState(context),
                "tokens": 0,
                "loss": 0.0,
                "history": [],
            }
        )
        steps = context.steps(
            settings.epochs * text.steps,
            work=settings.epochs * text.targets,
            corpus=settings.corpus,
            vocabulary=len(text.vocabulary),
            tokens=text.tokens,
            steps_an_epoch=text.steps,
        )
        for step in steps:
            epoch = -(-step // text.steps)
            loss, tokens = self.train((step - 1) % text.steps)
            state["tokens"] += tokens
            state["loss"] += loss * tokens
            context.log(done=state["tokens"], loss=loss, epoch=epoch)
            if step == epoch * text.steps:  # the last of the epoch
                with context.evaluating():
                    validated = self.validate()
                trained, score = state["loss"] / text.targets, perplexity(validated)
                message = f"Epoch {epoch}\tvalidation loss {validated:.4f}\tperplexity {score:.2f}"
                context.logger.info(message, training_loss=round(trained, 4))
                context.log(score=score)
                state["history"].append([trained, validated])
                state["loss"] = 0.0
        epochs, score = len(state["history"]), perplexity(state["history"][-1][1])
        message = f"Finished: validation perplexity {score:.2f} after {epochs} epochs"
        return context.finish(message, perplexity=score, epochs=epochs, steps=context.step)

    def train(self, number: int) -> tuple[float, int]:
        """Makes a step with a window of the text. Returns the mean loss per token, and the number of predicted
        tokens."""
        metrics, context = self.metrics, self.context
        inputs, targets = self.window(True, number, self.text.steps)
        with context.gradients() as gradients:
            losses = self.losses(inputs, targets, number, 1 / targets.numel())
            with metrics.rnn_backward_seconds.time():
                torch.stack(losses).sum().backward()
            with metrics.rnn_optimizer_seconds.time():
                loss, norm = float(torch.stack(losses).detach().sum()), gradients.norm()
                context.require_finite(loss, norm, hint="the loss or its gradient is not finite; lower LR")
                gradients.step(optimizer.MAX_GRAD_NORM)
        metrics.rnn_grad_norm.set(norm)
        for direction, width in (("received", self.settings.embedding_size), ("sent", self.settings.hidden_size)):
            metrics.rnn_gradient_bytes.labels(direction).inc(4 * width * targets.numel())
        return loss, targets.numel()

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss per token of the validation text."""
        total, count = 0.0, self.text.validation_steps
        for number in range(count):
            total += float(sum(self.losses(*self.window(False, number, count), number, 1.0)))
        return total / self.text.validation_targets

    def window(self, training: bool, number: int, count: int) -> tuple[Tensor, Tensor]:
        """A window of the text, of `count`. The trainer sends the next one meanwhile."""

        def ask(number: int) -> Future[tuple[Tensor, Tensor]]:
            return self.calls.call(self.trainer, Trainer.window, training, number)

        asked = self.asked.pop((training, number), None) or ask(number)
        following = (number + 1) % count
        self.asked = {(training, following): ask(following)}
        return asked.result()

    def losses(self, inputs: Tensor, targets: Tensor, number: int, scale: float) -> list[Tensor]:
        """The summed loss of each micro-batch, times `scale`. One is decoded while the LSTM processes the next."""
        metrics, answers, losses = self.metrics, list[Future[Tensor]](), list[Tensor]()
        for part, columns in enumerate(self.parts):
            with metrics.rnn_embedding_seconds.time():
                vectors = self.embedding(inputs[:, columns].to(self.embedding.weight.device))
            answers.append(self.calls.call(self.trainer, Trainer.hidden, part, number, vectors))
        waited = 0.0
        for answer, columns in zip(answers, self.parts, strict=True):
            with self.context.timer() as timer:
                hidden = answer.result()
            waited += timer.seconds
            with metrics.rnn_decoder_seconds.time(), self.context.span("decode"):
                device, wanted = self.decoder.weight.device, targets[:, columns].contiguous()
                losses.append(self.decoder.loss(hidden.to(device), wanted.to(device), scale, pool=self.loss_threads))
        if torch.is_grad_enabled():
            metrics.rnn_wait_seconds.observe(waited)
        return losses


class TrainerState:
    """The trainer's part of the checkpoint."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self._context = context

    def state_dict(self) -> dict[str, Any]:
        """Fetches the state."""
        (saved,) = self._context.call_all(Trainer.save)
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sends the state to the trainer."""
        list(self._context.call_all(Trainer.load, state))


class Trainer:
    """The text, the LSTM with its state and its optimizer."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.settings, self.metrics, self.device = context.settings, context.metrics, context.device
        with context.phase("loading"):
            self.text = corpus.load(context.settings)
        parts = self.text.validation, self.text.train
        self.streams = [corpus.streams(part, context.settings.batch_size) for part in parts]
        self.lstm = Lstm(context.settings).to(self.device)
        self.optimizer = optimizer.dense(context.settings, self.lstm)
        context.optimize(self.optimizer)
        torch.manual_seed(context.settings.seed)  # dropout is the same in every generation
        start = self.lstm.start(context.settings.batch_size)
        chunks = [*zip(*(each.chunk(context.settings.micro_batches, 1) for each in start), strict=True)]
        self.states = [dict(enumerate(chunks)) for _ in parts]  # of the LSTM, of each micro-batch
        self.initial = copy.deepcopy(self.save())

    def attached(self, _: Context[RnnSettings]) -> None:
        """Begins anew, unless `load` follows."""
        self.load(self.initial)

    @remote
    def describe(self) -> TextDescription:
        """Describes the text."""
        (validation, train), sequence = self.streams, self.settings.sequence
        return TextDescription(
            corpus=self.settings.corpus,
            digest=self.text.digest,
            vocabulary=self.text.vocabulary,
            tokens=len(self.text.train),
            targets=corpus.targets(train),
            steps=corpus.steps(train, sequence),
            validation_targets=corpus.targets(validation),
            validation_steps=corpus.steps(validation, sequence),
        )

    @remote
    def window(self, training: bool, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [up to SEQUENCE, batch]."""
        return corpus.window(self.streams[training], number, self.settings.sequence)

    @remote(grad=True, serial=True)
    def hidden(self, part: int, number: int, vectors: Tensor) -> Tensor:
        """The hidden states [length, streams, hidden] after `vectors` [length, streams, width] of the micro-batch
        `part` of window `number`. It trains if gradients are on."""
        training = torch.is_grad_enabled()
        states = self.states[training]
        if number == 0:
            states[part] = self.lstm.start(vectors.shape[1])
        self.lstm.train(training)
        with self.metrics.rnn_lstm_seconds.time():
            hidden, (one, two) = self.lstm(vectors.to(self.device), states[part])
        states[part] = one.detach(), two.detach()
        return hidden  # type: ignore[no-any-return]

    @remote
    def save(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint: `load` continues exactly from it."""
        hidden, cell = (torch.cat(each, 1) for each in zip(*self.states[True].values(), strict=True))
        return {
            "lstm": self.lstm.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": (hidden, cell),
            "rng": torch.get_rng_state(),
        }

    @remote
    def load(self, state: dict[str, Any]) -> None:
        """Continues from the trainer's part of a checkpoint."""
        self.lstm.load_state_dict(state["lstm"])
        self.optimizer.load_state_dict(state["optimizer"])
        hidden, cell = (each.to(self.device).chunk(self.settings.micro_batches, 1) for each in state["state"])
        self.states[True] = dict(enumerate(zip(hidden, cell, strict=True)))
        torch.set_rng_state(state["rng"])
