"""The trainer: reads the text, runs the LSTM, and drives the ps, whose embedding and decoder it has built there."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.config import UsageError
from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context
from rolecall.jobs.rnn import RnnSettings, corpus, evaluate, optimizer, server
from rolecall.jobs.rnn.model import Lstm, State

# what the weights and the order of the text depend on
KEPT = (
    "corpus",
    "corpus_bytes",
    "tokens",
    "vocabulary",
    "embedding_size",
    "hidden_size",
    "layers",
    "batch_size",
    "sequence",
    "seed",
)


def run(context: Context) -> None:
    """Train until the epochs are done, and then wait for the end of the process."""
    trainer = Trainer(context)
    if trainer.train():
        trainer.finish()
    threading.Event().wait()  # bounded by the supervisor


class Trainer:
    """The LSTM, the text, and how far it has been read."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, RnnSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.log = telemetry.log()
        s = self.settings
        self.ps = context.members[0].name
        self.device = context.device
        self.wire = self.device if self.ps in context.mapped else torch.device("cpu")
        self.text = corpus.load(s)
        self.train_streams = corpus.streams(self.text.train, s.batch_size)
        self.validation_streams = corpus.streams(self.text.validation, s.batch_size)
        self.lstm = Lstm(s).to(self.device)
        self.state = self.lstm.start(s.batch_size)
        self.epoch = self.position = self.step = 0
        self.seconds = 0.0
        self.history: list[list[float]] = []  # of each epoch: mean training loss, validation loss
        self.loss, self.tokens = 0.0, 0  # of this epoch, so far
        torch.manual_seed(s.seed)
        self._join()

    def _join(self) -> None:
        """Build the modules on the ps and the optimizers on both ranks; go on from the newest checkpoint."""
        found = self._call(server.begin)
        if found is not None:
            self._restore(found)
        tokens = len(self.text.vocabulary)
        timeout = self.settings.connect_timeout
        self.embedding = rpc.remote(self.ps, server.embedding, args=(tokens,), timeout=timeout)
        self.decoder = rpc.remote(self.ps, server.decoder, args=(tokens,), timeout=timeout)
        dense = [*optimizer.references(self.lstm), *self._call(server.parameters, self.decoder)]
        self.optimizers = optimizer.build(self.settings, dense, self._call(server.parameters, self.embedding))
        self._own = optimizer.held_by(self.optimizers, self.context.me.name)
        self._theirs = optimizer.held_by(self.optimizers, self.ps)
        if found is not None:
            optimizer.load(self._own, found["optimizers"])
            self._call(server.load, self._theirs)

    def _restore(self, found: dict[str, Any]) -> None:
        for name, before in found["settings"].items():
            if name in KEPT and before != getattr(self.settings, name):
                raise UsageError(
                    f"{name.upper()}={getattr(self.settings, name)}: the newest checkpoint in CHECKPOINT_DIR was made "
                    f"with {before}; set that, or another directory"
                )
        if found["digest"] != self.text.digest:
            raise UsageError(
                f"CORPUS={self.settings.corpus}: the text is not the one that the newest checkpoint in CHECKPOINT_DIR "
                "learned from; bring that back, or set another directory"
            )
        self.lstm.load_state_dict(found["weights"]["lstm"])
        hidden, cell = (one.to(self.device) for one in found["state"])
        self.state = hidden, cell
        self.epoch, self.position, self.step = found["epoch"], found["position"], found["step"]
        self.history, self.loss, self.tokens = found["history"], found["loss"], found["tokens"]
        self.seconds = found["seconds"]
        torch.set_rng_state(found["rng"])

    # ---- the loop

    def train(self) -> bool:
        """Go through the text. Returns False where a drain ended it."""
        s, steps = self.settings, corpus.steps(self.train_streams, self.settings.sequence)
        self._started, self._before = time.monotonic(), self.seconds
        self._first = self._logged = self._done()
        self._logged_at, self._logged_loss = self._started, self.loss
        self.log.info("training", corpus=s.corpus, vocabulary=len(self.text.vocabulary), epoch=self.epoch + 1,
                      step=self.step, steps_an_epoch=steps, tokens=len(self.text.train))  # fmt: skip
        self._call(server.note, self.step, {"train": 0})
        while self.epoch < s.epochs:
            self.metrics.rnn_epoch.set(self.epoch + 1)
            while self.position < steps:
                inputs, targets = corpus.window(self.train_streams, self.position, s.sequence)
                loss, due = self._learn(inputs, targets)
                self.position += 1
                self.step += 1
                self.loss += loss
                self.tokens += targets.numel()
                self.seconds = self._before + time.monotonic() - self._started
                self._progress(targets.numel())
                if due and not self._save():
                    return False
            self._end_epoch()
        return True

    def _learn(self, inputs: Tensor, targets: Tensor) -> tuple[float, bool]:
        """One step: the loss summed over `targets` [length, batch], and whether a checkpoint is due."""
        s = self.settings
        self.lstm.train()
        parts = [part.tolist() for part in torch.arange(s.batch_size).chunk(s.micro_batches)]
        cuts = [slice(part[0], part[-1] + 1) for part in parts]
        waited, losses, states = 0.0, [], []
        with dist_autograd.context() as context_id:
            # all that the ps can begin with; while it works on one micro-batch, the LSTM does on the next
            vectors = [self._begin(server.embed, self.embedding, inputs[:, cut].contiguous()) for cut in cuts]
            for cut, coming in zip(cuts, vectors, strict=True):
                with telemetry.Timer() as timer:
                    found = coming.wait()
                waited += timer.seconds
                with self.metrics.rnn_lstm_seconds.time():
                    own: State = (self.state[0][:, cut].contiguous(), self.state[1][:, cut].contiguous())
                    hidden, after = self.lstm(found.to(self.device), own)
                states.append(after)
                wanted = targets[:, cut].contiguous()
                losses.append(
                    self._begin(
                        server.decode, context_id, self.decoder, hidden.to(self.wire), wanted, 1 / targets.numel()
                    )
                )
            with telemetry.Timer() as timer:
                arrived = [one.wait() for one in losses]
            self.metrics.rnn_wait_seconds.observe(waited + timer.seconds)
            # one pass for all: torch's engine waits for every call made in the context_id, so one for each would never end
            mean = torch.stack(arrived).sum()
            with self.metrics.rnn_backward_seconds.time():
                dist_autograd.backward(context_id, [mean])  # type: ignore[attr-defined]
            with self.metrics.rnn_optimizer_seconds.time():
                norm, due = self._call(server.clip, context_id, optimizer.square_norm(context_id), self.step)
                loss = float(mean.detach())
                hint = "the loss or its gradient is not finite; lower LR or MAX_GRAD_NORM"
                self.context.require_finite(loss, norm, hint=hint)
                optimizer.scale(context_id, norm, s.max_grad_norm)
                for one in self.optimizers:
                    one.step(context_id)
        self.state = tuple(torch.cat(one, 1).detach() for one in zip(*states, strict=True))  # type: ignore[assignment]
        self.metrics.rnn_grad_norm.set(norm)
        for direction, width in (("received", s.hidden_size), ("sent", s.embedding_size)):
            self.metrics.rnn_gradient_bytes.labels(direction).inc(4 * width * targets.numel())
        return loss * targets.numel(), due

    def _progress(self, tokens: int) -> None:
        s, now, done = self.settings, time.monotonic(), self._done()
        self.metrics.rnn_tokens.inc(tokens)
        self.context.report(self.step)
        rate = (done - self._first) / (now - self._started)
        left = (s.epochs * self._an_epoch() - done) / rate
        self.metrics.rnn_left_seconds.set(left)
        if self.step % s.log_interval == 0:
            mean = (self.loss - self._logged_loss) / (done - self._logged)
            self.metrics.rnn_loss.set(mean)
            self._call(server.note, self.step, {"loss": mean, "done": done})
            per_second = (done - self._logged) / (now - self._logged_at)
            self.log.info(f"Epoch {self.epoch + 1}\tstep {self.step}\tloss {mean:.4f}",
                          perplexity=round(_perplexity(mean), 1), tokens_per_s=round(per_second),
                          left_s=round(left))  # fmt: skip
            self._logged, self._logged_at, self._logged_loss = done, now, self.loss

    def _end_epoch(self) -> None:
        with self.context.evaluating():
            trained, found = self.loss / self.tokens, self._validate()
        self.metrics.rnn_perplexity.set(_perplexity(found))
        self._call(server.note, self.step, {"score": _perplexity(found), "done": self._done()})
        self.log.info(f"Epoch {self.epoch + 1}\tvalidation loss {found:.4f}\tperplexity {_perplexity(found):.2f}",
                      training_loss=round(trained, 4))  # fmt: skip
        self.history.append([trained, found])
        self.epoch += 1
        self.position, self.loss, self.tokens, self._logged_loss = 0, 0.0, 0, 0.0
        self._logged = self._done()
        self.state = self.lstm.start(self.settings.batch_size)

    @torch.no_grad()
    def _validate(self) -> float:
        """The mean loss of a token of the validation text."""
        self.lstm.eval()
        found, state = self.validation_streams, self.lstm.start(self.settings.batch_size)
        total, sequence = 0.0, self.settings.sequence
        calls: list[torch.futures.Future[float]] = []
        for number in range(corpus.steps(found, sequence)):
            inputs, targets = corpus.window(found, number, sequence)
            hidden, state = self.lstm(self._embed(inputs), state)
            calls.append(self._begin(server.validate, self.decoder, hidden.to(self.wire), targets))
            if len(calls) > 1:  # the next one is computed meanwhile
                total += calls.pop(0).wait()
        return (total + sum(call.wait() for call in calls)) / (found.numel() - found.shape[1])

    # ---- the end, and checkpoints

    def finish(self) -> None:
        """Show a piece of text, and have the last checkpoint written."""
        s, perplexity = self.settings, _perplexity(self.history[-1][1])
        if s.sample_tokens:
            self.lstm.eval()
            text = evaluate.continued(self.text.vocabulary, "\n", s.sample_tokens, self.lstm, self._embed, self._sample)
            self.log.info("sample", text=text.strip("\n"))
        self.log.info(f"Finished: validation perplexity {perplexity:.2f} after {self.epoch} epochs",
                      steps=self.step, seconds=round(self.seconds, 1))  # fmt: skip
        self._save({"perplexity": perplexity, "epochs": self.epoch, "steps": self.step, "seconds": self.seconds})

    def _save(self, summary: dict[str, Any] | None = None) -> bool:
        """Have a checkpoint written. Returns whether to go on after it."""
        half = {
            "weights": {"lstm": self.lstm.state_dict()},
            "optimizers": optimizer.state(self._own),
            "vocabulary": list(self.text.vocabulary.words),
            "digest": self.text.digest,
            "settings": self.settings.model_dump(include=set(KEPT)),
            "state": list(self.state),
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "history": self.history,
            "loss": self.loss,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
        }
        return bool(self._call(server.save, self.step, half, self._theirs, summary))

    # ---- calls

    def _begin(self, function: Any, *args: Any) -> torch.futures.Future[Any]:
        return rolecall_rpc.call(self.ps, function, *args, timeout=self.settings.step_timeout)

    def _call(self, function: Any, *args: Any) -> Any:
        return self._begin(function, *args).wait()

    def _embed(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._call(server.embed, self.embedding, tokens)
        return found.detach().to(self.device)

    def _sample(self, hidden: Tensor) -> int:
        return int(self._call(server.sample, self.decoder, hidden.to(self.wire), self.settings.temperature))

    # ---- numbers

    def _an_epoch(self) -> int:
        """Tokens that an epoch learns from."""
        return self.train_streams.numel() - self.train_streams.shape[1]

    def _done(self) -> int:
        """Tokens that were learned from, over all epochs."""
        return self.epoch * self._an_epoch() + self.tokens


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 30.0))  # beyond that it has diverged, and only makes lines long
