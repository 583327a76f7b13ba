"""The two roles: the ps, rank 0, holds the embedding and the decoder and requests steps, which the trainer makes."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from rolecall import Context, remote
from rolecall.jobs.rnn import RnnSettings, corpus, optimizer
from rolecall.jobs.rnn.corpus import TextDescription
from rolecall.jobs.rnn.evaluate import perplexity
from rolecall.jobs.rnn.loss import GradientSums, LossThreads
from rolecall.jobs.rnn.model import Decoder, Embedding, Lstm

P = ParamSpec("P")
T = TypeVar("T")


class ModelServer:
    """The ps. The trainer calls `embed` and `decode` through a torch RRef of this object, so that gradients flow back,
    and the methods marked as remote without gradients.
    """

    # built once the size of the vocabulary is known
    embedding: Embedding
    decoder: Decoder
    dense: torch.optim.Optimizer  # of the decoder
    sparse: torch.optim.Optimizer  # of the embedding

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.loss_threads = LossThreads(context.threads)
        self.sums = GradientSums()  # of the micro-batches of a step
        self.step_context = -1  # the distributed autograd context of that step
        self.lock = threading.Lock()  # one micro-batch at a time: the trainer waits for the first

    def run(self) -> dict[str, Any]:
        """Trains for EPOCHS, and validates after each. Other threads serve the trainer's calls meanwhile."""
        context, settings = self.context, self.settings
        (text,) = context.call_all(Trainer.describe)
        self.build(len(text.vocabulary))
        state = context.restore(
            {
                "text": text,
                "embedding": self.embedding,
                "decoder": self.decoder,
                "dense": self.dense,
                "sparse": self.sparse,
                "trainer": TrainerState(context),
                "tokens": 0,
                "loss": 0.0,
                "history": [],
            }
        )
        # longer than any call that the trainer makes meanwhile
        calls = context.options(timeout=2 * settings.step_timeout + settings.rpc_timeout)
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
            ((loss, tokens),) = calls.call_all(Trainer.train, step)
            state["tokens"] += tokens
            state["loss"] += loss * tokens
            context.log(done=state["tokens"], loss=loss, epoch=epoch)
            if step == epoch * text.steps:  # the last of the epoch
                with context.evaluating():
                    (validated,) = context.call_all(Trainer.validate)
                trained, score = state["loss"] / text.targets, perplexity(validated)
                message = f"Epoch {epoch}\tvalidation loss {validated:.4f}\tperplexity {score:.2f}"
                context.logger.info(message, training_loss=round(trained, 4))
                context.log(score=score)
                state["history"].append([trained, validated])
                state["loss"] = 0.0
        epochs, score = len(state["history"]), perplexity(state["history"][-1][1])
        message = f"Finished: validation perplexity {score:.2f} after {epochs} epochs"
        return context.finish(message, perplexity=score, epochs=epochs, steps=context.step)

    def build(self, tokens: int) -> None:
        """Builds the modules and their optimizers."""
        self.embedding = Embedding(self.settings, tokens).to(self.context.device)
        self.decoder = Decoder(self.settings, tokens).to(self.context.device)
        self.dense = optimizer.dense(self.settings, self.decoder)
        self.sparse = optimizer.sparse(self.settings, self.embedding)

    # ---- called through a reference

    @remote
    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors [length, batch, width] of `tokens` [length, batch]."""
        with self.metrics.rnn_embedding_seconds.time(), self.context.span("embed"):
            vectors: Tensor = self.embedding(tokens.to(self.embedding.weight.device))
            return self._outgoing(vectors)

    def decode(self, context_id: int, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
        """The summed loss [] of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`. Logits
        and their gradients stay on this rank.
        """
        with self.metrics.rnn_decoder_seconds.time(), self.context.span("decode"), self.lock:
            if self.step_context != context_id:
                self.step_context, self.sums = context_id, GradientSums()
            return self._outgoing(self._loss(hidden, targets, scale))

    # ---- called without gradients

    @remote
    def square_norm(self, context_id: int) -> float:
        """The square of the norm of this rank's gradients."""
        return optimizer.square_norm(context_id)

    @remote
    def step(self, context_id: int, norm: float) -> None:
        """Makes a step of this rank's optimizers, with gradients that are clipped by the global `norm`."""
        optimizer.step(context_id, norm, self.dense, self.sparse)

    @remote
    def validate(self, hidden: Tensor, targets: Tensor) -> float:
        """The summed loss of `targets` [length, batch] after `hidden` [length, batch, hidden], without gradients."""
        with torch.no_grad(), self.lock:
            return float(self._loss(hidden, targets, 1.0))

    def _loss(self, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
        layer, device = self.decoder, self.decoder.weight.device
        return layer.loss(hidden.to(device), targets.to(device), scale, pool=self.loss_threads, sums=self.sums)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device that the trainer expects: a GPU only if both ranks compute on one."""
        trainer = self.context.peers("trainer")[0].name
        return tensor.to(self.context.device if trainer in self.context.torch.mapped else "cpu")


class TrainerState:
    """The trainer's part of the checkpoint."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self._context = context

    def state_dict(self) -> dict[str, Any]:
        """Fetches the state to the CPU."""
        (saved,) = self._context.call_all(Trainer.save)
        return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sends the state to the trainer."""
        list(self._context.call_all(Trainer.load, state))


class Trainer:
    """The text, the LSTM with its state and its optimizer, and a reference to the ps's object."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        settings, self.device = self.settings, context.device
        self.calls = context.options(timeout=settings.step_timeout)
        self.rpc_device = self.device if context.rank0.name in context.torch.mapped else torch.device("cpu")
        with context.phase("loading"):
            self.text = corpus.load(settings)
        self.train_streams = corpus.streams(self.text.train, settings.batch_size)
        self.validation_streams = corpus.streams(self.text.validation, settings.batch_size)
        columns = torch.arange(settings.batch_size).chunk(settings.micro_batches)
        self.micro_batches = [slice(int(part[0]), int(part[-1]) + 1) for part in columns]
        self.lstm = Lstm(settings).to(self.device)
        self.optimizer = optimizer.dense(settings, self.lstm)
        self.state = self.lstm.start(settings.batch_size)
        torch.manual_seed(settings.seed)  # dropout is the same in every generation
        self.server: rpc.RRef[ModelServer] = context.reference(context.rank0)

    @remote(turn=True)
    def describe(self) -> TextDescription:
        """Describes the text, once it is read and the LSTM is built."""
        return TextDescription(
            corpus=self.settings.corpus,
            digest=self.text.digest,
            vocabulary=self.text.vocabulary,
            tokens=len(self.text.train),
            targets=corpus.targets(self.train_streams),
            steps=corpus.steps(self.train_streams, self.settings.sequence),
        )

    @remote(turn=True)
    def train(self, step: int) -> tuple[float, int]:
        """Makes a step. Returns the mean loss per token, and the number of predicted tokens."""
        settings, metrics, context = self.settings, self.metrics, self.context
        position = (step - 1) % corpus.steps(self.train_streams, settings.sequence)
        inputs, targets = corpus.window(self.train_streams, position, settings.sequence)
        if position == 0:
            self.state = self.lstm.start(settings.batch_size)
        self.lstm.train()
        with dist_autograd.context() as context_id:
            # forward pass: the ps decodes one micro-batch while the LSTM processes the next
            waited, losses, states, parts = 0.0, [], [], self.micro_batches
            lookups = [self._invoke(ModelServer.embed, inputs[:, part].contiguous()) for part in parts]
            for part, lookup in zip(parts, lookups, strict=True):
                with context.timer() as timer, context.span("wait"):
                    vectors = lookup.wait()
                waited += timer.seconds
                with metrics.rnn_lstm_seconds.time():
                    hidden, cell = (each[:, part].contiguous() for each in self.state)
                    output, after = self.lstm(vectors.to(self.device), (hidden, cell))
                states.append(after)
                arguments = output.to(self.rpc_device), targets[:, part].contiguous(), 1 / targets.numel()
                losses.append(self._invoke(ModelServer.decode, context_id, *arguments))
            with context.timer() as timer, context.span("wait"):
                mean = torch.stack(torch.futures.wait_all(losses)).sum()
            metrics.rnn_wait_seconds.observe(waited + timer.seconds)
            # one backward pass for all micro-batches: torch's engine waits for every call made in the context, so a
            # pass for a single micro-batch would never end
            with metrics.rnn_backward_seconds.time():
                dist_autograd.backward(context_id, [mean])  # type: ignore[attr-defined]
            with metrics.rnn_optimizer_seconds.time():
                square = self.calls.call(context.rank0, ModelServer.square_norm, context_id)
                norm = (optimizer.square_norm(context_id) + square.result()) ** 0.5
                loss = float(mean.detach())
                context.require_finite(loss, norm, hint="the loss or its gradient is not finite; lower LR")
                stepped = self.calls.call(context.rank0, ModelServer.step, context_id, norm)
                optimizer.step(context_id, norm, self.optimizer)
                stepped.result()
        hidden, cell = (torch.cat(columns, 1).detach() for columns in zip(*states, strict=True))
        self.state = hidden, cell
        metrics.rnn_grad_norm.set(norm)
        for direction, width in (("received", settings.hidden_size), ("sent", settings.embedding_size)):
            metrics.rnn_gradient_bytes.labels(direction).inc(4 * width * targets.numel())
        context.report_step(step)
        return loss, targets.numel()

    def _invoke(self, method: Callable[Concatenate[ModelServer, P], T], *args: P.args, **_: P.kwargs) -> Future[T]:
        """Calls `method` of the ps's object by torch's RPC, which records the call for the backward pass."""
        # the future of `self.server.rpc_async()` takes no tensors of a GPU
        arguments, seconds = (self.server, method, *args), self.settings.step_timeout
        return rpc.rpc_async(self.server.owner(), invoke, args=arguments, timeout=seconds)  # type: ignore[no-any-return]

    @remote(turn=True)
    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss per token of the validation text."""
        self.lstm.eval()
        streams, sequence, ps = self.validation_streams, self.settings.sequence, self.context.rank0
        state, total = self.lstm.start(self.settings.batch_size), 0.0
        pending = []
        for number in range(corpus.steps(streams, sequence)):
            inputs, targets = corpus.window(streams, number, sequence)
            vectors = self.calls.call(ps, ModelServer.embed, inputs).result()
            output, state = self.lstm(vectors.to(self.device), state)
            pending.append(self.calls.call(ps, ModelServer.validate, output, targets))
            if len(pending) > 1:  # while the ps computes the newest
                total += pending.pop(0).result()
        total += sum(call.result() for call in pending)
        return total / corpus.targets(streams)

    @remote(turn=True)
    def save(self) -> bytes:
        """The trainer's part of a checkpoint, serialized by torch: `load` continues exactly from it."""
        file = io.BytesIO()
        state = {
            "lstm": self.lstm.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "rng": torch.get_rng_state(),
        }
        torch.save(state, file)
        return file.getvalue()

    @remote(turn=True)
    def load(self, state: dict[str, Any]) -> None:
        """Continues from the trainer's part of a checkpoint."""
        self.lstm.load_state_dict(state["lstm"])
        self.optimizer.load_state_dict(state["optimizer"])
        hidden, cell = state["state"]
        self.state = hidden.to(self.device), cell.to(self.device)
        torch.set_rng_state(state["rng"])


def invoke(server: rpc.RRef[ModelServer], method: Callable[..., T], *args: Any) -> T:
    """Runs at the ps, called by the trainer."""
    return method(server.local_value(), *args)
