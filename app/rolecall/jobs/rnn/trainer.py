"""The trainer: reads the text, runs the LSTM, and drives the ps, where it builds the embedding and the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.rnn import RnnSettings, calls, corpus, optimizer
from rolecall.jobs.rnn.evaluate import continuation, perplexity
from rolecall.jobs.rnn.messages import Counters, SaveRequest, TrainerState
from rolecall.jobs.rnn.model import Lstm


def run(context: Context[RnnSettings]) -> None:
    """Trains until the epochs are done or a drain's checkpoint is written."""
    trainer = Trainer(context)
    if trainer.train():
        trainer.finish()


class Trainer:
    """The LSTM, the text, and how far it has been read."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        s = self.settings
        self.ps = context.members[0].name
        self.device = context.device
        self.wire = self.device if self.ps in context.mapped else torch.device("cpu")
        self.text = corpus.load(s)
        self.train_streams = corpus.streams(self.text.train, s.batch_size)
        self.validation_streams = corpus.streams(self.text.validation, s.batch_size)
        self.lstm = Lstm(s).to(self.device)
        self.state = self.lstm.start(s.batch_size)
        self.counters = Counters()
        torch.manual_seed(s.seed)
        self._connect()

    def _connect(self) -> None:
        """Builds the modules on the ps and the optimizers on both ranks; restores the newest checkpoint."""
        snapshot = self._call(calls.restore)
        if snapshot is not None:
            snapshot.require_digest(self.text.digest, f"CORPUS={self.settings.corpus}")
        tokens, timeout = len(self.text.vocabulary), self.settings.connect_timeout
        self.embedding = rpc.remote(self.ps, calls.embedding, args=(tokens,), timeout=timeout)
        self.decoder = rpc.remote(self.ps, calls.decoder, args=(tokens,), timeout=timeout)
        dense = [*optimizer.references(self.lstm), *self._call(calls.parameters, self.decoder)]
        self.optimizers = optimizer.build(self.settings, dense, self._call(calls.parameters, self.embedding))
        self._local_optimizers = optimizer.held_by(self.optimizers, self.context.me.name)
        self._ps_optimizers = optimizer.held_by(self.optimizers, self.ps)
        if snapshot is not None:
            self._restore(TrainerState.of(snapshot.state))
            self._call(calls.load, self._ps_optimizers)

    def _restore(self, state: TrainerState) -> None:
        self.lstm.load_state_dict(state.lstm)
        optimizer.load(self._local_optimizers, state.optimizers)
        hidden, cell = state.state
        self.state = hidden.to(self.device), cell.to(self.device)
        self.counters = state.counters
        torch.set_rng_state(state.rng)

    # ---- the loop

    def train(self) -> bool:
        """Goes through the text. Returns False where a drain ends it."""
        s, c, steps = self.settings, self.counters, corpus.steps(self.train_streams, self.settings.sequence)
        total = s.epochs * corpus.targets(self.train_streams)
        self.context.start(c.step, done=self._done, total=total, corpus=s.corpus, epoch=c.epoch + 1,
                           vocabulary=len(self.text.vocabulary), tokens=len(self.text.train),
                           steps_an_epoch=steps)  # fmt: skip
        while c.epoch < s.epochs:
            while c.position < steps:
                inputs, targets = corpus.window(self.train_streams, c.position, s.sequence)
                loss, checkpoint_due = self._step(inputs, targets)
                c.position += 1
                c.step += 1
                c.loss += loss * targets.numel()
                c.tokens += targets.numel()
                self.context.log(c.step, done=self._done, loss=loss, epoch=c.epoch + 1)
                if checkpoint_due and not self._save():
                    return False
            self._end_epoch()
        return True

    def _step(self, inputs: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Trains on one step's inputs and targets [length, batch]. Returns the mean loss of a token, and whether a
        checkpoint is due.
        """
        with dist_autograd.context() as context_id:
            mean = self._forward(context_id, inputs, targets)
            # one pass for all: torch's engine waits for every call made in the context, so a pass for each micro-batch
            # would never end
            with self.metrics.rnn_backward_seconds.time():
                dist_autograd.backward(context_id, [mean])  # type: ignore[attr-defined]
            with self.metrics.rnn_optimizer_seconds.time():
                clipped = self._call(calls.clip, context_id, optimizer.square_norm(context_id))
                loss = float(mean.detach())
                self.context.require_finite(
                    loss, clipped.norm, hint="the loss or its gradient is not finite; lower LR or MAX_GRAD_NORM"
                )
                optimizer.clip(context_id, clipped.norm, self.settings.max_grad_norm)
                for each in self.optimizers:
                    each.step(context_id)
        self.metrics.rnn_grad_norm.set(clipped.norm)
        for direction, width in (("received", self.settings.hidden_size), ("sent", self.settings.embedding_size)):
            self.metrics.rnn_gradient_bytes.labels(direction).inc(4 * width * targets.numel())
        return loss, clipped.checkpoint_due

    def _forward(self, context_id: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss [] of `targets` [length, batch] after `inputs` and the state, which moves on. The ps works on
        one micro-batch while the LSTM does on the next.
        """
        self.lstm.train()
        waited, losses, states = 0.0, [], []
        columns = torch.arange(self.settings.batch_size).chunk(self.settings.micro_batches)
        cuts = [slice(int(part[0]), int(part[-1]) + 1) for part in columns]
        lookups = [self._begin(calls.embed, self.embedding, inputs[:, cut].contiguous()) for cut in cuts]
        for cut, lookup in zip(cuts, lookups, strict=True):
            with self.context.timer() as timer:
                (vectors,) = self.context.wait_all([lookup])
            waited += timer.seconds
            with self.metrics.rnn_lstm_seconds.time():
                hidden, cell = (each[:, cut].contiguous() for each in self.state)
                output, after = self.lstm(vectors.to(self.device), (hidden, cell))
            states.append(after)
            arguments = output.to(self.wire), targets[:, cut].contiguous(), 1 / targets.numel()
            losses.append(self._begin(calls.decode, context_id, self.decoder, *arguments))
        with self.context.timer() as timer:
            shares = self.context.wait_all(losses)
        self.metrics.rnn_wait_seconds.observe(waited + timer.seconds)
        hidden, cell = (torch.cat(parts, 1).detach() for parts in zip(*states, strict=True))
        self.state = hidden, cell
        return torch.stack(shares).sum()

    def _end_epoch(self) -> None:
        c = self.counters
        with self.context.evaluating():
            trained, validated = c.loss / c.tokens, self._validate()
        score = perplexity(validated)
        self.context.logger.info(f"Epoch {c.epoch + 1}\tvalidation loss {validated:.4f}\tperplexity {score:.2f}",
                                 training_loss=round(trained, 4))  # fmt: skip
        self.context.log(c.step, score=score)
        c.history.append([trained, validated])
        c.epoch += 1
        c.position, c.loss, c.tokens = 0, 0.0, 0
        self.state = self.lstm.start(self.settings.batch_size)

    @torch.no_grad()
    def _validate(self) -> float:
        """The mean loss of a token of the validation text."""
        self.lstm.eval()
        streams, state = self.validation_streams, self.lstm.start(self.settings.batch_size)
        total, sequence = 0.0, self.settings.sequence
        pending: list[Future[float]] = []
        for number in range(corpus.steps(streams, sequence)):
            inputs, targets = corpus.window(streams, number, sequence)
            output, state = self.lstm(self._embed(inputs), state)
            pending.append(self._begin(calls.validate, self.decoder, output.to(self.wire), targets))
            if len(pending) > 1:  # the ps computes the last one meanwhile
                total += float(*self.context.wait_all([pending.pop(0)]))
        total += float(sum(self.context.wait_all(pending)))
        return total / corpus.targets(streams)

    # ---- the end, and checkpoints

    def finish(self) -> None:
        """Logs a piece of generated text, and has the last checkpoint written, which ends the job."""
        s = self.settings
        if s.sample_tokens:
            self.lstm.eval()
            text = continuation(self.text.vocabulary, "\n", s.sample_tokens, self.lstm, self._embed, self._sample)
            self.context.logger.info("sample", text=text.strip("\n"))
        self._save(final=True)

    def _save(self, final: bool = False) -> bool:
        """Has a checkpoint written. Returns whether to train on."""
        state = TrainerState(
            counters=self.counters,
            lstm=self.lstm.state_dict(),
            optimizers=optimizer.states(self._local_optimizers),
            state=list(self.state),
            rng=torch.get_rng_state(),
            vocabulary=list(self.text.vocabulary.words),
            digest=self.text.digest,
        )
        return bool(self._call(calls.save, SaveRequest(state, self._ps_optimizers, final)))

    @property
    def _done(self) -> int:
        """Tokens trained on, over all epochs."""
        return self.counters.epoch * corpus.targets(self.train_streams) + self.counters.tokens

    # ---- calls

    def _begin(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.context.call(self.ps, function, *args, timeout=self.settings.step_timeout)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        (answer,) = self.context.wait_all([self._begin(function, *args)])
        return answer

    def _embed(self, tokens: Tensor) -> Tensor:
        """The vectors [length, batch, width] of `tokens` [length, batch], without a gradient."""
        vectors: Tensor = self._call(calls.embed, self.embedding, tokens)
        return vectors.detach().to(self.device)

    def _sample(self, hidden: Tensor) -> int:
        return int(self._call(calls.sample, self.decoder, hidden.to(self.wire), self.settings.temperature))
